"""The report's charts, from the published files alone: which there are, and what they draw."""

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from harness.plan.arms import BASELINE, CONTROL
from harness.record.row import Predicted, Sample
from harness.report import chart_specs as specs
from harness.verdict.schema import ReconcileFile, RequestEntry, Summary
from harness.words_and_colours import (
    PASS_COLOURS,
    PHASE_COLOURS,
    SOURCES,
    START,
    STOP,
    WARMUP,
    Mark,
)

# All charts of a kind together: a mark costs 0.4 kB in the file and 1 kB of SVG in the browser, so
# beyond these they show every k-th request, and say so.
MOST_MARKS = 4_000
_SOURCE_ROWS = 3 / 8  # of that many: up to six bars each
Drawn = TypeVar("Drawn")
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
    summary: Summary, reconciliation: ReconcileFile, *, most: int = MOST_MARKS
) -> list[Figure]:
    """Every chart the published files have data for; ``most``: marks of all of a kind together."""
    found = [
        *_ttft(summary, reconciliation, most),
        *_paired(summary, most),
        *_sources(summary, reconciliation, int(most * _SOURCE_ROWS)),
        *_cliff(summary),
        *_timeline(summary),
    ]
    met: Counter[str] = Counter()
    return [_named(figure, met) for figure in found]


def _named(figure: Figure, met: Counter[str]) -> Figure:
    """``figure`` under a file name that no earlier one has: foreign names may differ in signs only."""
    met[figure.name] += 1
    n = met[figure.name]
    return figure if n == 1 else replace(figure, name=f"{figure.name}-{n}")


def arms_of(summary: Summary) -> dict[str, Mark]:
    """Arms that were measured and their marks: those compared first, control, the others."""
    treatment = summary.compared[1]
    found = {arm: None for content in summary.passes.values() for arm in content.arms}
    first = [arm for arm in (BASELINE, treatment, CONTROL) if arm in found]
    return specs.arm_marks([*first, *sorted(found.keys() - set(first))], treatment)


def thinned(rows: Sequence[Drawn], most: int) -> Sequence[Drawn]:
    """Every k-th row, with the smallest k that leaves at most ``most``."""
    return rows[:: -(-len(rows) // most)] if rows else rows


def phase_colours(summary: Summary) -> Iterable[tuple[str, str]]:
    """Phase and colour of the timeline, in order, for a legend outside the chart."""
    yield START, PHASE_COLOURS[START]
    yield WARMUP, PHASE_COLOURS[WARMUP]
    for i, name in enumerate(summary.passes):
        yield name, PASS_COLOURS[i % len(PASS_COLOURS)]
    yield STOP, PHASE_COLOURS[STOP]


def _slug(*words: str) -> str:
    text = re.sub(r"[^a-z0-9]+", "-", "-".join(words).lower())
    return text[:_LONGEST_NAME].strip("-") or "chart"


def _recorded(
    reconciliation: ReconcileFile, *, session: str | None = None, pass_name: str | None = None
) -> int:
    """Rows of one session or pass where the file lists only some of them; 0 where it has all."""
    if reconciliation.every == 1:
        return 0
    return sum(
        part.recorded
        for part in reconciliation.by_pass
        if session in (None, part.session) and pass_name in (None, part.pass_name)
    )


def _ttft(summary: Summary, reconciliation: ReconcileFile, most: int) -> Iterator[Figure]:
    arms = arms_of(summary)
    measured = [
        (request, request.row)
        for request in reconciliation.requests
        if request.row and request.row.phase == "measure"
    ]
    times = [row.ttft_ms for _, row in measured if row.complete and row.ttft_ms]
    if not times:
        return
    # One axis for all passes, or a small pass looks like a large one.
    domain = [min(times) / 1.15, max(times) * 1.15]
    for name in summary.passes:
        requests = [(request, row) for request, row in measured if request.pass_name == name]
        first = {request.session: row.seq for request, row in reversed(requests)}
        shown = thinned(requests, max(1, most // len(summary.passes)))
        n_all = _recorded(reconciliation, pass_name=name) or len(requests)
        values = [
            _ttft_value(request, row, first[request.session], domain[0]) for request, row in shown
        ]
        yield Figure(
            _slug("ttft", name), "ttft", name,
            f"TTFT of {len(shown)} requests of {name}, in the order they were sent, by arm; the "
            "same numbers are in the table of requests.",
            specs.ttft(values, arms=arms, domain=domain), len(shown), n_all,
        )  # fmt: skip


def _ttft_value(
    request: RequestEntry, row: Sample, first_seq: int, foot_ms: float
) -> dict[str, Any]:
    """One mark. A failed request has no time: it is drawn at the foot of the chart, as a cross."""
    is_good = bool(row.complete and row.ttft_ms)
    predicted = request.predicted
    return {
        "n": row.seq - first_seq + 1,
        "ttft": row.ttft_ms if is_good else foot_ms,
        "failed": not is_good,
        "arm": row.config,
        "session": request.session,
        "doc": str(request.doc),
        "time": "none" if row.ttft_ms is None else f"{row.ttft_ms:,.1f} ms",
        "split": _split(row),
        "predicted": f"no exact prediction: {predicted.why_not}"
        if predicted and predicted.why_not
        else _split(predicted),
        "bytes": "not measured" if row.loaded_bytes is None else f"{row.loaded_bytes:,}",
        "error": row.error or row.unattributed or "none",
    }


def _split(tokens: Sample | Predicted | None) -> str:
    if tokens is None or tokens.computed is None:
        return "unknown"
    return ", ".join(f"{getattr(tokens, source.field):,} {source.word}" for source in SOURCES)


def _paired(summary: Summary, most: int) -> Iterator[Figure]:
    listed = {
        name: (pairs, pairs.documents)
        for name, content in summary.passes.items()
        if (pairs := content.paired_ratio) and pairs.documents
    }
    ends = [end for _, documents in listed.values() for d in documents for end in (d.low, d.high)]
    if not ends:
        return
    domain = [min([*ends, 1.0]) / 1.1, max([*ends, 1.0]) * 1.1]
    base, treatment = summary.compared
    decision = summary.decision
    for name, (pairs, documents) in listed.items():
        threshold = decision.rule.min_ratio if name == decision.pass_name else None
        shown = thinned(documents, max(1, most // len(listed)))
        yield Figure(
            _slug("paired", name), "paired", name,
            f"Paired TTFT ratio of {len(shown)} documents in {name}: median and range over "
            f"{len(pairs.blocks)} blocks. All documents: {pairs.ratio:.2f}.",
            specs.paired(
                [document.as_json() for document in shown],
                quotient=f"{base} ÷ {treatment}", domain=domain, threshold=threshold,
            ),
            len(shown), len(documents),
        )  # fmt: skip


def _sources(summary: Summary, reconciliation: ReconcileFile, most: int) -> Iterator[Figure]:
    for name in (session.session for session in summary.sessions):
        requests = [
            (row, request.predicted)
            for request in reconciliation.requests
            if request.session == name and (row := request.row) and row.is_attributed
        ]
        if not requests:
            continue
        shown = thinned(requests, max(1, most // len(summary.sessions)))
        is_predicted = any(predicted and predicted.is_exact for _, predicted in requests)
        below = (
            "predicted below it. Equal shapes mean no residual."
            if is_predicted
            else "nothing below it, because there is no exact prediction."
        )
        yield Figure(
            _slug("sources", name), "sources", name,
            f"Prompt tokens of {len(shown)} requests of session {name} by source: "
            f"measured above the line, {below}",
            specs.sources(list(_bars(shown)), seqs=[row.seq for row, _ in shown]),
            len(shown), _recorded(reconciliation, session=name) or len(requests),
        )  # fmt: skip


def _bars(requests: Iterable[tuple[Sample, Predicted | None]]) -> Iterator[dict[str, Any]]:
    """One bar for each source that gave tokens, measured and predicted."""
    for row, predicted in requests:
        for kind, split, sign in (("measured", row, 1), ("predicted", predicted, -1)):
            for source in SOURCES:
                if tokens := getattr(split, source.field, None):
                    yield {
                        "seq": row.seq,
                        "where": f"{row.pass_name}, document {row.doc}",
                        "source": source.word,
                        "kind": kind,
                        "tokens": tokens,
                        "signed": sign * tokens,
                    }


def _cliff(summary: Summary) -> Iterator[Figure]:
    curve = summary.cliff
    if not curve or not curve.points:
        return
    yield Figure(
        "cliff", "cliff", curve.pass_name,
        f"Predicted share of {curve.pass_name} that is computed against the size of the GPU tier, "
        f"with the measured points. This plan has {curve.gpu_tokens:,} tokens of GPU tier for a "
        f"working set of {curve.working_set_tokens:,}.",
        specs.cliff(curve, arms=arms_of(summary)),
    )  # fmt: skip


def _timeline(summary: Summary) -> Iterator[Figure]:
    spans = [
        {"session": session.session, **span.as_json()}
        for session in summary.sessions
        for span in session.spans
    ]
    if not spans:
        return
    n_sessions = len(summary.sessions)
    colours = dict(phase_colours(summary))
    yield Figure(
        "timeline", "timeline", "sessions",
        f"When the {n_sessions} sessions ran: server start, warm-up, passes, stop.",
        specs.timeline(spans, colours=colours, n_sessions=n_sessions),
    )  # fmt: skip
