"""What a run under load shows beyond TTFT: rates, queues, and all of it by where the KV came from.

A GPU hit behind a queue of recomputed prompts is slow, and a tier that shortens the queue helps it: only
source and queue side by side show that.
"""

from array import array
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from statistics import median, quantiles

from harness.plan.load import LoadSection
from harness.record.row import Row
from harness.verdict.measured import LoadCell, LoadSource, Times
from harness.verdict.tally import source_class
from sim.split import SOURCE_CLASSES, Units

MIN_N_FOR_P90 = 20
MIN_N_FOR_P99 = 200
"""Below these a percentile would be one of the two largest values."""

UNKNOWN = "unknown"
_SOURCES = (*SOURCE_CLASSES, UNKNOWN)


def _floats() -> "array[float]":
    return array("d")


@dataclass(slots=True)
class _Group:
    """Times in ms of complete rows, one entry each but where a server or an answer says none."""

    ttft: "array[float]" = field(default_factory=_floats)
    queue: "array[float]" = field(default_factory=_floats)
    per_token: "array[float]" = field(default_factory=_floats)
    total: "array[float]" = field(default_factory=_floats)

    def add(self, row: Row, *, ttft_ms: float, per_token_ms: float | None) -> None:
        self.ttft.append(ttft_ms)
        self.total.append((row.total_ms or 0) + (row.late_ms or 0))
        if row.queue_ms is not None:
            self.queue.append(row.queue_ms)
        if per_token_ms is not None:
            self.per_token.append(per_token_ms)

    def extend(self, other: "_Group") -> None:
        for mine, its in (
            (self.ttft, other.ttft), (self.queue, other.queue),
            (self.per_token, other.per_token), (self.total, other.total),
        ):  # fmt: skip
            mine.extend(its)

    def summary(self) -> LoadSource:
        return LoadSource(
            n=len(self.ttft),
            ttft_ms=times_of(self.ttft),
            queue_ms=times_of(self.queue),
            tpot_ms=times_of(self.per_token),
            total_ms=times_of(self.total),
        )


@dataclass(slots=True)
class _Pass:
    """One pass of one session."""

    arm: str
    began_ns: int
    last_due_ns: int
    ended_ns: int
    n: int = 0
    failed: int = 0
    good: int = 0
    output_tokens: int = 0
    busy_ms: float = 0.0
    late: "array[float]" = field(default_factory=_floats)
    sources: dict[str, _Group] = field(default_factory=dict)


@dataclass(slots=True)
class UnderLoad:
    """One walk over the measured rows; ``load`` and ``units`` are the plan's."""

    load: LoadSection
    units: Units
    _passes: dict[tuple[str, str], _Pass] = field(default_factory=dict)

    def add(self, row: Row) -> None:
        """Take a row; a warm-up row counts nowhere."""
        if row.phase != "measure":
            return
        due_ns = row.sent_unix_ns - round((row.late_ms or 0) * 1e6)
        ended_ns = row.sent_unix_ns + round((row.total_ms or 0) * 1e6)
        met = self._passes.setdefault(
            (row.session, row.pass_name), _Pass(row.config, due_ns, due_ns, ended_ns)
        )
        met.n += 1
        met.began_ns = min(met.began_ns, due_ns)
        met.last_due_ns = max(met.last_due_ns, due_ns)
        met.ended_ns = max(met.ended_ns, ended_ns)
        if row.late_ms is not None:
            met.late.append(row.late_ms)
        if row.ttft_ms is None or row.total_ms is None:
            met.failed += 1
            return
        ttft_ms = row.ttft_ms + (row.late_ms or 0)
        n_tokens = row.output_tokens or 0
        per_token_ms = (row.total_ms - row.ttft_ms) / (n_tokens - 1) if n_tokens > 1 else None
        met.output_tokens += n_tokens
        met.busy_ms += row.total_ms
        met.good += self._is_good(ttft_ms, per_token_ms)
        name = source_class(row, self.units) or UNKNOWN
        met.sources.setdefault(name, _Group()).add(row, ttft_ms=ttft_ms, per_token_ms=per_token_ms)

    def _is_good(self, ttft_ms: float, per_token_ms: float | None) -> bool:
        most_ttft, most_per_token = self.load.slo_ttft_ms, self.load.slo_tpot_ms
        return (most_ttft is None or ttft_ms <= most_ttft) and (
            most_per_token is None or per_token_ms is None or per_token_ms <= most_per_token
        )

    def cells(self) -> list[LoadCell]:
        """By pass and arm, in order of first appearance; the sessions of an arm together."""
        groups: dict[tuple[str, str], list[_Pass]] = {}
        for (_, name), met in self._passes.items():
            groups.setdefault((name, met.arm), []).append(met)
        order = {name: i for i, (_, name) in enumerate(self._passes)}
        return [
            self._cell(name, arm, sessions)
            for (name, arm), sessions in sorted(groups.items(), key=lambda g: order[g[0][0]])
        ]

    def _cell(self, name: str, arm: str, sessions: list[_Pass]) -> LoadCell:
        span_s = sum(met.ended_ns - met.began_ns for met in sessions) / 1e9
        due_s = sum(met.last_due_ns - met.began_ns for met in sessions) / 1e9
        n, failed = sum(met.n for met in sessions), sum(met.failed for met in sessions)
        late = [ms for met in sessions for ms in met.late]
        has_slo = self.load.slo_ttft_ms is not None or self.load.slo_tpot_ms is not None
        good = sum(met.good for met in sessions)
        return LoadCell(
            pass_name=name,
            arm=arm,
            n=n,
            failed=failed,
            offered_per_s=(n - len(sessions)) / due_s if self.load.rate and due_s else None,
            done_per_s=(n - failed) / span_s if span_s else None,
            output_tokens_per_s=_per_s(sessions, span_s),
            mean_in_flight=sum(met.busy_ms for met in sessions) / 1e3 / span_s if span_s else None,
            late_ms=times_of(late),
            good=good if has_slo else None,
            good_per_s=good / span_s if has_slo and span_s else None,
            all=_together(sessions, _SOURCES).summary(),
            sources={
                source: _together(sessions, [source]).summary()
                for source in _SOURCES
                if any(source in met.sources for met in sessions)
            },
        )


def _per_s(sessions: Iterable[_Pass], span_s: float) -> float | None:
    return sum(met.output_tokens for met in sessions) / span_s if span_s else None


def _together(sessions: Iterable[_Pass], sources: Iterable[str]) -> _Group:
    total, wanted = _Group(), set(sources)
    for met in sessions:
        for name, group in met.sources.items():
            if name in wanted:
                total.extend(group)
    return total


def times_of(values: Iterable[float]) -> Times | None:
    """Median, p90, p99 and the largest, in ms; None without values."""
    known = sorted(values)
    if not known:
        return None
    return Times(
        n=len(known),
        p50=median(known),
        p90=_percentile(known, 90) if len(known) >= MIN_N_FOR_P90 else None,
        p99=_percentile(known, 99) if len(known) >= MIN_N_FOR_P99 else None,
        max=known[-1],
    )


def _percentile(known: list[float], share: int) -> float:
    return quantiles(known, n=100, method="inclusive")[share - 1]


def rows_of(cells: Iterable[LoadCell]) -> Iterator[tuple[LoadCell, str, LoadSource]]:
    """A row a source of each cell, and one for all where there are several."""
    for cell in cells:
        yield from ((cell, name, source) for name, source in cell.sources.items())
        if len(cell.sources) > 1:
            yield cell, "all", cell.all
