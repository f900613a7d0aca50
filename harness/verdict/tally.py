"""One walk over the rows: arrays per pass and session, never the rows themselves.

A million rows take about 30 MB here, so a journal of any length is summarized while it is read.
"""

from array import array
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Protocol

from sim.split import SOURCE_CLASSES, class_of

UNKNOWN_SOURCE = -1


class Sample(Protocol):
    """What the statistics read of a request; ``harness.record.journal.Row`` is one.

    Times in ms, tokens as integers, None where not measured.
    """

    @property
    def config(self) -> str: ...
    @property
    def pass_name(self) -> str: ...
    @property
    def doc(self) -> int: ...
    @property
    def doc_tokens(self) -> int: ...
    @property
    def ttft_ms(self) -> float | None: ...
    @property
    def total_ms(self) -> float | None: ...
    @property
    def session(self) -> str: ...
    @property
    def order(self) -> int: ...
    @property
    def seq(self) -> int: ...
    @property
    def phase(self) -> str: ...
    @property
    def prompt_tokens(self) -> int | None: ...
    @property
    def computed(self) -> int | None: ...
    @property
    def gpu_hit(self) -> int | None: ...
    @property
    def host_loaded(self) -> int | None: ...
    @property
    def loaded_bytes(self) -> int | None: ...
    @property
    def stored_tokens(self) -> int | None: ...
    @property
    def settle_ms(self) -> float | None: ...
    @property
    def complete(self) -> bool: ...
    @property
    def sent_unix_ns(self) -> int: ...


@dataclass(slots=True)
class Cell:
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

    def of_source(self, source: int) -> list[float]:
        """TTFT of the complete rows whose document came from ``source``."""
        return [t for t, s in zip(self.ttft_ms, self.source, strict=True) if s == source]


@dataclass(slots=True)
class Session:
    """One server's life: its arm, its position in the run, and its cells by pass."""

    config: str
    order: int
    cells: dict[str, Cell] = field(default_factory=dict)
    warmup: Cell = field(default_factory=Cell)


@dataclass(slots=True)
class Tally:
    """All sessions by name, and the passes in order of first appearance."""

    sessions: dict[str, Session] = field(default_factory=dict)
    passes: dict[str, None] = field(default_factory=dict)

    def arms(self, pass_name: str) -> dict[str, dict[str, Cell]]:
        """Cells of one pass by arm, then session, each in order of first appearance."""
        arms: dict[str, dict[str, Cell]] = {}
        for name, session in self.sessions.items():
            if pass_name in session.cells:
                arms.setdefault(session.config, {})[name] = session.cells[pass_name]
        return arms

    def in_order(self, config: str, pass_name: str) -> list[str]:
        """Sessions of an arm that have the pass, by position in the run."""
        named = [
            (session.order, name)
            for name, session in self.sessions.items()
            if session.config == config and pass_name in session.cells
        ]
        return [name for _, name in sorted(named)]


def tally(rows: Iterable[Sample], *, block_size: int) -> Tally:
    """Add up ``rows`` in one walk; ``block_size`` in tokens tells full from partial GPU hits."""
    total = Tally()
    for row in rows:
        session = total.sessions.get(row.session)
        if session is None:
            session = total.sessions[row.session] = Session(row.config, row.order)
        if row.phase != "measure":
            _add(session.warmup, row, block_size)
            continue
        cell = session.cells.get(row.pass_name)
        if cell is None:
            cell = session.cells[row.pass_name] = Cell()
            total.passes[row.pass_name] = None
        _add(cell, row, block_size)
    return total


def _add(cell: Cell, row: Sample, block_size: int) -> None:
    _add_span(cell, row)
    if row.computed is not None:
        tokens = cell.tokens
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
        cell.settle_ms.append(row.settle_ms)
    if not row.complete:
        cell.failed += 1
        return
    if row.ttft_ms is None:
        return
    cell.seq.append(row.seq)
    cell.doc.append(row.doc)
    cell.ttft_ms.append(row.ttft_ms)
    name = source_class(row, block_size)
    cell.source.append(UNKNOWN_SOURCE if name is None else SOURCE_CLASSES.index(name))


def _add_span(cell: Cell, row: Sample) -> None:
    sent = row.sent_unix_ns
    ended = sent + int((row.total_ms or 0) * 1e6)
    if cell.began_ns is None or sent < cell.began_ns:
        cell.began_ns = sent
    if cell.ended_ns is None or ended > cell.ended_ns:
        cell.ended_ns = ended


def source_class(row: Sample, block_size: int) -> str | None:
    """``class_of`` a row; None when its sources are unknown."""
    if row.computed is None or row.gpu_hit is None or row.host_loaded is None:
        return None
    split = row.computed, row.gpu_hit, row.host_loaded
    return class_of(*split, question=(row.prompt_tokens or 0) - row.doc_tokens, block=block_size)
