"""One walk over the rows: arrays per pass and session, never the rows themselves.

A million rows take about 30 MB here, so a journal of any length is summarized while it is read.
"""

from array import array
from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field

from harness.record.row import Sample
from sim.split import SOURCE_CLASSES, TokenSplit, Units, class_of

UNKNOWN_SOURCE = -1


@dataclass(slots=True)
class PassRows:
    """The rows of one pass in one session.

    ``seq``, ``doc``, ``ttft_ms``, ``source`` have one entry a complete row, in journal order;
    ``source`` is an index into ``SOURCE_CLASSES`` or ``UNKNOWN_SOURCE``. ``tokens`` sums the rows
    with known sources; it has no ``loaded_bytes`` or ``stored`` where no row knows. ``began_ns`` to ``ended_ns`` is wall clock, a label.
    """

    seq: "array[int]" = field(default_factory=lambda: array("q"))
    doc: "array[int]" = field(default_factory=lambda: array("q"))
    ttft_ms: "array[float]" = field(default_factory=lambda: array("d"))
    source: "array[int]" = field(default_factory=lambda: array("b"))
    settle_ms: "array[float]" = field(default_factory=lambda: array("d"))
    failed: int = 0
    tokens: Counter[str] = field(default_factory=Counter)
    began_ns: int | None = None
    ended_ns: int | None = None

    def only(self, source: int) -> "PassRows":
        """The complete rows whose document came from ``source``: documents and TTFTs alone."""
        kept = [i for i, each in enumerate(self.source) if each == source]
        return PassRows(
            doc=array("q", (self.doc[i] for i in kept)),
            ttft_ms=array("d", (self.ttft_ms[i] for i in kept)),
        )

    def of_source(self, source: int) -> list[float]:
        """TTFT of the complete rows whose document came from ``source``."""
        return [t for t, s in zip(self.ttft_ms, self.source, strict=True) if s == source]


@dataclass(slots=True)
class SessionRows:
    """One server's life: its arm, its position in the run, and its rows by pass."""

    arm: str
    order: int
    passes: dict[str, PassRows] = field(default_factory=lambda: defaultdict(PassRows))
    warmup: PassRows = field(default_factory=PassRows)


@dataclass(slots=True)
class Tally:
    """All sessions by name, and the passes in order of first appearance."""

    sessions: dict[str, SessionRows] = field(default_factory=dict)
    passes: dict[str, None] = field(default_factory=dict)

    def arms(self, pass_name: str) -> dict[str, dict[str, PassRows]]:
        """Rows of one pass by arm, then session, each in order of first appearance."""
        arms: dict[str, dict[str, PassRows]] = {}
        for name, session in self.sessions.items():
            if pass_name in session.passes:
                arms.setdefault(session.arm, {})[name] = session.passes[pass_name]
        return arms

    def arms_by_position(self) -> dict[int, str]:
        """The arms of the sessions met, by position in the run, the first first."""
        return dict(sorted((session.order, session.arm) for session in self.sessions.values()))

    def at_position(self, position: int) -> str | None:
        """The session at ``position`` in the run; None where it has no row."""
        return next((n for n, s in self.sessions.items() if s.order == position), None)

    def in_order(self, arm: str, pass_name: str) -> list[str]:
        """Sessions of an arm that have the pass, by position in the run."""
        named = [
            (session.order, name)
            for name, session in self.sessions.items()
            if session.arm == arm and pass_name in session.passes
        ]
        return [name for _, name in sorted(named)]


def tally(rows: Iterable[Sample], *, units: Units) -> Tally:
    """Add up ``rows`` in one walk; ``units`` tell whole documents served from parts of them."""
    total = Tally()
    for row in rows:
        session = total.sessions.get(row.session)
        if session is None:
            session = total.sessions[row.session] = SessionRows(row.config, row.order)
        if row.phase == "measure":
            total.passes[row.pass_name] = None
            _add(session.passes[row.pass_name], row, units)
        else:
            _add(session.warmup, row, units)
    return total


def _add(met: PassRows, row: Sample, units: Units) -> None:
    _add_span(met, row)
    if row.computed is not None:
        tokens = met.tokens
        tokens["n"] += 1
        tokens["prompt"] += row.prompt_tokens or 0
        tokens["computed"] += row.computed
        tokens["gpu_hit"] += row.gpu_hit or 0
        tokens["host_loaded"] += row.host_loaded or 0
        if row.loaded_bytes is not None:
            tokens["loaded_bytes"] += row.loaded_bytes
        if row.stored_tokens is not None:
            tokens["stored"] += row.stored_tokens
    if row.settle_ms is not None:
        met.settle_ms.append(row.settle_ms)
    if not row.complete:
        met.failed += 1
        return
    if row.ttft_ms is None:
        return
    met.seq.append(row.seq)
    met.doc.append(row.doc)
    met.ttft_ms.append(row.ttft_ms)
    name = source_class(row, units)
    met.source.append(UNKNOWN_SOURCE if name is None else SOURCE_CLASSES.index(name))


def _add_span(met: PassRows, row: Sample) -> None:
    sent = row.sent_unix_ns
    ended = sent + int((row.total_ms or 0) * 1e6)
    met.began_ns = sent if met.began_ns is None else min(met.began_ns, sent)
    met.ended_ns = ended if met.ended_ns is None else max(met.ended_ns, ended)


def source_class(row: Sample, units: Units) -> str | None:
    """``class_of`` a row; None when its sources are unknown."""
    if row.computed is None or row.gpu_hit is None or row.host_loaded is None:
        return None
    split = TokenSplit(row.prompt_tokens or 0, row.computed, row.gpu_hit, row.host_loaded)
    return class_of(split, doc_tokens=row.doc_tokens, units=units)
