"""One plain sentence for each kind of chart in the report: what to see in it."""

from collections.abc import Iterator

from harness.forecast.cliff import Cliff
from harness.verdict.measured import ArmCell, Statistics
from harness.words_and_colours import SOURCES


def takeaways_of(statistics: Statistics, pass_name: str, cliff: Cliff | None) -> dict[str, str]:
    """Sentence by kind of chart (``ttft``, ``paired``, ``sources``, ``cliff``, ``timeline``).

    Of ``pass_name``, the pass that is decided on; a kind whose cells are empty has none.
    """
    found = {
        "ttft": _ttft(statistics, pass_name),
        "paired": _paired(statistics, pass_name),
        "sources": _sources(statistics, pass_name),
        "cliff": _cliff(cliff, statistics.compared[0]),
        "timeline": _timeline(statistics),
    }
    return {kind: text for kind, text in found.items() if text}


def _arms(statistics: Statistics, pass_name: str) -> Iterator[tuple[str, ArmCell]]:
    """The compared arms that have complete requests in the pass."""
    arms = statistics.arms_in(pass_name)
    for arm in statistics.compared:
        if arm in arms and arms[arm].n:
            yield arm, arms[arm]


def _ttft(statistics: Statistics, pass_name: str) -> str:
    parts = [
        f"{cell.p50_ms:,.1f} ms with {arm} (n {cell.n:,})"
        for arm, cell in _arms(statistics, pass_name)
    ]
    return f"Median in {pass_name}: {', '.join(parts)}." if parts else ""


def _paired(statistics: Statistics, pass_name: str) -> str:
    pairs = statistics.pairs_in(pass_name)
    if not pairs or not pairs.documents:
        return ""
    n, blocks = len(pairs.documents), len(pairs.blocks)
    faster = sum(document.low > 1 for document in pairs.documents)
    slower = sum(document.high < 1 for document in pairs.documents)
    blocks_of = "the one block" if blocks == 1 else f"every one of {blocks} blocks"
    others = "; the others differ by block" if faster + slower < n else ""
    return (
        f"In {pass_name}, {faster:,} of {n:,} documents are faster with {statistics.compared[1]} "
        f"in {blocks_of}, {slower:,} slower{others}."
    )


def _sources(statistics: Statistics, pass_name: str) -> str:
    parts = []
    for arm, cell in _arms(statistics, pass_name):
        tokens = cell.tokens
        if tokens.prompt:
            shares = (
                f"{getattr(tokens, source.field) / tokens.prompt:.1%} {source.word}"
                for source in SOURCES
            )
            parts.append(f"{arm} {', '.join(shares)}")
    return f"Prompt tokens in {pass_name}: {'; '.join(parts)}." if parts else ""


def _cliff(curve: Cliff | None, base: str) -> str:
    points = [point for point in curve.points if point.arm == base] if curve else []
    if curve is None or not points:
        return ""
    here = next(point.share for point in points if point.gpu_tokens == curve.gpu_tokens)
    least = min(point.share for point in points)
    full = next(point.gpu_tokens for point in points if point.share == least)
    return (
        f"{base} is predicted to recompute {here:.1%} of {curve.pass_name} with this plan's "
        f"{curve.gpu_tokens:,} tokens of GPU tier, and the least, {least:.1%}, from {full:,} on."
    )


def _timeline(statistics: Statistics) -> str:
    sessions = [session for session in statistics.sessions if session.spans]
    spans = [span for session in sessions for span in session.spans]
    if not spans:
        return ""
    began = min(span.began_unix_ms for span in spans)
    ended = max(span.ended_unix_ms for span in spans)
    seconds = (ended - began) / 1e3
    duration = f"{seconds:.0f} s" if seconds < 120 else f"{seconds / 60:.1f} min"
    return f"{len(sessions)} session{'s' if len(sessions) > 1 else ''} in {duration}."
