"""The report's charts, from the published files alone: which there are, and what they draw."""

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from harness.plan.labels import BASELINE, CONTROL
from harness.report.chart_specs import (
    arm_marks,
    cliff_spec,
    paired_spec,
    sources_spec,
    timeline_spec,
    ttft_spec,
)
from harness.vocabulary import PASS_COLOURS, PHASE_COLOURS, SOURCES, START, STOP, WARMUP, Mark

# All charts of a kind together: a mark costs 0.4 kB in the file and 1 kB of SVG in the browser, so
# beyond these they show every k-th request, and say so.
MOST_MARKS = 4_000
_SOURCE_ROWS = 3 / 8  # of that many: up to six bars each
_LONGEST_NAME = 80  # a file name holds 255 bytes, and the report's own name comes before it


@dataclass(frozen=True, slots=True)
class Figure:
    """One chart: ``name`` is its file name, ``kind`` its section, ``label`` its text alternative.

    ``n_rows`` of ``n_all`` journal rows are drawn.
    """

    name: str
    kind: str
    title: str
    label: str
    spec: dict[str, Any]
    n_rows: int = 0
    n_all: int = 0


def figures(
    summary: Mapping[str, Any],
    reconciliation: Mapping[str, Any],
    *,
    legend: bool = False,
    most: int = MOST_MARKS,
) -> list[Figure]:
    """Every chart the published files have data for; ``legend`` for charts that stand alone.

    ``most``: marks of all charts of a kind together.
    """
    found = [
        *_ttft(summary, reconciliation, legend, most),
        *_paired(summary, most),
        *_sources(summary, reconciliation, legend, int(most * _SOURCE_ROWS)),
        *_cliff(summary, legend),
        *_timeline(summary, legend),
    ]
    met: Counter[str] = Counter()
    return [_named(figure, met) for figure in found]


def _named(figure: Figure, met: Counter[str]) -> Figure:
    """``figure`` under a file name that no earlier one has: foreign names may differ in signs only."""
    met[figure.name] += 1
    n = met[figure.name]
    return figure if n == 1 else replace(figure, name=f"{figure.name}-{n}")


def arms_of(summary: Mapping[str, Any]) -> dict[str, Mark]:
    """Arms that were measured and their marks: those compared first, control, the others."""
    treatment = summary["compared"][1]
    found = {arm: None for content in summary["passes"].values() for arm in content["arms"]}
    first = [arm for arm in (BASELINE, treatment, CONTROL) if arm in found]
    return arm_marks([*first, *sorted(found.keys() - set(first))], treatment)


def thinned(rows: Sequence[Any], most: int) -> Sequence[Any]:
    """Every k-th row, with the smallest k that leaves at most ``most``."""
    return rows[:: -(-len(rows) // most)] if rows else rows


def phase_colours(summary: Mapping[str, Any]) -> Iterable[tuple[str, str]]:
    """Phase and colour of the timeline, in order, for a legend outside the chart."""
    yield START, PHASE_COLOURS[START]
    yield WARMUP, PHASE_COLOURS[WARMUP]
    for i, name in enumerate(summary["passes"]):
        yield name, PASS_COLOURS[i % len(PASS_COLOURS)]
    yield STOP, PHASE_COLOURS[STOP]


def _slug(*words: str) -> str:
    text = re.sub(r"[^a-z0-9]+", "-", "-".join(words).lower())
    return text[:_LONGEST_NAME].strip("-") or "chart"


def _n_recorded(reconciliation: Mapping[str, Any], field: str, value: str) -> int:
    """Rows of one session or pass where the file lists only some of them; 0 where it has all."""
    if reconciliation["every"] == 1:
        return 0
    return sum(part["recorded"] for part in reconciliation["by_pass"] if part[field] == value)


def _ttft(
    summary: Mapping[str, Any], reconciliation: Mapping[str, Any], legend: bool, most: int
) -> Iterator[Figure]:
    arms = arms_of(summary)
    measured = [r for r in reconciliation["requests"] if r["phase"] == "measure"]
    times = [r["ttft_ms"] for r in measured if r["complete"] and r["ttft_ms"]]
    if not times:
        return
    # One axis for all passes, or a small pass looks like a large one.
    domain = [min(times) / 1.15, max(times) * 1.15]
    for name in summary["passes"]:
        rows = [r for r in measured if r["pass"] == name]
        first: dict[str, int] = {}
        for row in rows:
            first[row["session"]] = min(first.get(row["session"], row["seq"]), row["seq"])
        shown = thinned(rows, max(1, most // len(summary["passes"])))
        n_all = _n_recorded(reconciliation, "pass", name) or len(rows)
        values = [_ttft_value(row, first[row["session"]], domain[0]) for row in shown]
        yield Figure(
            _slug("ttft", name), "ttft", name,
            f"TTFT of {len(shown)} requests of {name}, in the order they were sent, by arm; the "
            "same numbers are in the table of requests.",
            ttft_spec(values, arms=arms, domain=domain, legend=legend), len(shown), n_all,
        )  # fmt: skip


def _ttft_value(row: Mapping[str, Any], first_seq: int, foot_ms: float) -> dict[str, Any]:
    """One mark. A failed request has no time: it is drawn at the foot of the chart, as a cross."""
    is_good = bool(row["complete"] and row["ttft_ms"])
    return {
        "n": row["seq"] - first_seq + 1,
        "ttft": row["ttft_ms"] if is_good else foot_ms,
        "failed": not is_good,
        "arm": row["config"],
        **_tooltip(row),
    }


def _tooltip(row: Mapping[str, Any]) -> dict[str, str]:
    return {
        "session": str(row["session"]),
        "doc": str(row["doc"]),
        "time": "none" if row["ttft_ms"] is None else f"{row['ttft_ms']:,.1f} ms",
        "split": _split(row["measured"]),
        "predicted": _predicted(row),
        "bytes": "not measured" if row["loaded_bytes"] is None else f"{row['loaded_bytes']:,}",
        "error": row["error"] or row["unattributed"] or "none",
    }


def _predicted(row: Mapping[str, Any]) -> str:
    if row["why_not_predicted"]:
        return f"no exact prediction: {row['why_not_predicted']}"
    return _split(row["predicted"])


def _split(tokens: Mapping[str, Any] | None) -> str:
    if tokens is None or tokens["computed"] is None:
        return "unknown"
    return ", ".join(f"{tokens[source.field]:,} {source.word}" for source in SOURCES)


def _paired(summary: Mapping[str, Any], most: int) -> Iterator[Figure]:
    pairs = {
        name: content["paired_ratio"]
        for name, content in summary["passes"].items()
        if content["paired_ratio"] and content["paired_ratio"]["documents"]
    }
    ends = [d[end] for p in pairs.values() for d in p["documents"] for end in ("low", "high")]
    if not ends:
        return
    domain = [min([*ends, 1.0]) / 1.1, max([*ends, 1.0]) * 1.1]
    for name, pair in pairs.items():
        threshold = None
        if name == summary["decision"]["pass"] and summary["decision"]["evidence"]:
            threshold = summary["decision"]["evidence"]["threshold"]
        shown = thinned(pair["documents"], max(1, most // len(pairs)))
        yield Figure(
            _slug("paired", name), "paired", name,
            f"Paired TTFT ratio of {len(shown)} documents in {name}: median and range over "
            f"{len(pair['blocks'])} blocks. All documents: {pair['ratio']:.2f}.",
            paired_spec(
                shown, quotient=" ÷ ".join(summary["compared"]), domain=domain, threshold=threshold
            ),
            len(shown), len(pair["documents"]),
        )  # fmt: skip


def _sources(
    summary: Mapping[str, Any], reconciliation: Mapping[str, Any], legend: bool, most: int
) -> Iterator[Figure]:
    for session in summary["sessions"]:
        rows = [
            r
            for r in reconciliation["requests"]
            if r["session"] == session["session"]
            and r["measured"] is not None
            and r["measured"]["computed"] is not None
        ]
        if not rows:
            continue
        shown = thinned(rows, max(1, most // len(summary["sessions"])))
        is_predicted = any(row["predicted"] and not row["why_not_predicted"] for row in rows)
        below = (
            "predicted below it. Equal shapes mean no residual."
            if is_predicted
            else "nothing below it, because there is no exact prediction."
        )
        yield Figure(
            _slug("sources", session["session"]), "sources", session["session"],
            f"Prompt tokens of {len(shown)} requests of session {session['session']} by source: "
            f"measured above the line, {below}",
            sources_spec(_bars(shown), seqs=[row["seq"] for row in shown], legend=legend),
            len(shown),
            _n_recorded(reconciliation, "session", session["session"]) or len(rows),
        )  # fmt: skip


def _bars(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """One bar for each source that gave tokens, measured and predicted."""
    return [
        {
            "seq": row["seq"],
            "where": f"{row['pass']}, document {row['doc']}",
            "source": source.word,
            "kind": kind,
            "tokens": row[kind][source.field],
            "signed": row[kind][source.field] * (1 if kind == "measured" else -1),
        }
        for row in rows
        for kind in ("measured", "predicted")
        if row[kind] is not None
        for source in SOURCES
        if row[kind][source.field]
    ]


def _cliff(summary: Mapping[str, Any], legend: bool) -> Iterator[Figure]:
    curve = summary["cliff"]
    if not curve or not curve["points"]:
        return
    yield Figure(
        "cliff", "cliff", curve["pass"],
        f"Predicted share of {curve['pass']} that is computed against the size of the GPU tier, "
        f"with the measured points. This plan has {curve['gpu_tokens']:,} tokens of GPU tier for a "
        f"working set of {curve['working_set_tokens']:,}.",
        cliff_spec(curve, arms=arms_of(summary), legend=legend),
    )  # fmt: skip


def _timeline(summary: Mapping[str, Any], legend: bool) -> Iterator[Figure]:
    spans = [
        {"session": session["session"], **span}
        for session in summary["sessions"]
        for span in session["spans"]
    ]
    if not spans:
        return
    n_sessions = len(summary["sessions"])
    colours = dict(phase_colours(summary))
    yield Figure(
        "timeline", "timeline", "sessions",
        f"When the {n_sessions} sessions ran: server start, warm-up, passes, stop.",
        timeline_spec(spans, colours=colours, n_sessions=n_sessions, legend=legend),
    )  # fmt: skip
