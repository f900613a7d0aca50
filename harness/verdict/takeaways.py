"""One plain sentence for each kind of chart in the report: what to see in it."""

from collections.abc import Iterator, Mapping
from typing import Any

Summary = Mapping[str, Any]


def takeaways(summary: Summary) -> dict[str, str]:
    """Sentence by kind of chart (``ttft``, ``paired``, ``sources``, ``cliff``, ``timeline``).

    Of the pass that is decided on; a kind whose cells are empty has none.
    """
    found = {
        "ttft": _ttft(summary),
        "paired": _paired(summary),
        "sources": _sources(summary),
        "cliff": _cliff(summary),
        "timeline": _timeline(summary),
    }
    return {kind: text for kind, text in found.items() if text}


def _arms(summary: Summary) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """The compared arms that have complete requests in the pass decided on."""
    arms = summary["passes"].get(summary["decision"]["pass"], {}).get("arms", {})
    for arm in summary["compared"]:
        if arm in arms and arms[arm]["n"]:
            yield arm, arms[arm]


def _ttft(summary: Summary) -> str:
    parts = [
        f"{cell['p50_ms']:,.1f} ms with {arm} (n {cell['n']:,})" for arm, cell in _arms(summary)
    ]
    return f"Median in {summary['decision']['pass']}: {', '.join(parts)}." if parts else ""


def _paired(summary: Summary) -> str:
    name, treatment = summary["decision"]["pass"], summary["compared"][1]
    pairs = summary["passes"].get(name, {}).get("paired_ratio")
    if not pairs or not pairs["documents"]:
        return ""
    n, blocks = len(pairs["documents"]), len(pairs["blocks"])
    faster = sum(document["low"] > 1 for document in pairs["documents"])
    slower = sum(document["high"] < 1 for document in pairs["documents"])
    blocks_of = "the one block" if blocks == 1 else f"every one of {blocks} blocks"
    others = "; the others differ by block" if faster + slower < n else ""
    return (
        f"In {name}, {faster:,} of {n:,} documents are faster with {treatment} in {blocks_of}, "
        f"{slower:,} slower{others}."
    )


def _sources(summary: Summary) -> str:
    parts = []
    for arm, cell in _arms(summary):
        tokens = cell["tokens"]
        if tokens["prompt"]:
            shares = (tokens[part] / tokens["prompt"] for part in _PARTS)
            words = (
                f"{share:.1%} {word}" for share, word in zip(shares, _PARTS.values(), strict=True)
            )
            parts.append(f"{arm} {', '.join(words)}")
    return f"Prompt tokens in {summary['decision']['pass']}: {'; '.join(parts)}." if parts else ""


_PARTS = {"computed": "computed", "gpu_hit": "GPU hit", "host_loaded": "host-loaded"}


def _cliff(summary: Summary) -> str:
    curve, base = summary["cliff"], summary["compared"][0]
    points = [point for point in curve["points"] if point["arm"] == base] if curve else []
    if not points:
        return ""
    here = next(p["share"] for p in points if p["gpu_tokens"] == curve["gpu_tokens"])
    least = min(point["share"] for point in points)
    full = next(point["gpu_tokens"] for point in points if point["share"] == least)
    return (
        f"{base} is predicted to recompute {here:.1%} of {curve['pass']} with this plan's "
        f"{curve['gpu_tokens']:,} tokens of GPU tier, and the least, {least:.1%}, from {full:,} on."
    )


def _timeline(summary: Summary) -> str:
    spans = [
        (session["session"], span) for session in summary["sessions"] for span in session["spans"]
    ]
    if not spans:
        return ""
    began = min(span["began_unix_ms"] for _, span in spans)
    ended = max(span["ended_unix_ms"] for _, span in spans)
    n = len({session for session, _ in spans})
    return f"{n} session{'s' if n > 1 else ''} in {_duration((ended - began) / 1e3)}."


def _duration(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 120 else f"{seconds / 60:.1f} min"
