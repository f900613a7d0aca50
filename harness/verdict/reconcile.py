"""Join journal and prediction on the request key: every planned request, its sources, its residual.

Needs no engine: a run folder is enough, on any laptop.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Generic, TypeVar

from harness.errors import InputError
from harness.plan.files import read_plan
from harness.plan.plan import Plan, documents_of, planned_keys, session_name
from harness.record.folder import PLAN_FILE, PREDICTION_FILE, RunFolder
from harness.record.journal import walk_predictions
from harness.record.row import PredictedRow, Row
from sim.workload import WARMUP_PASS, pass_name

Key = tuple[str, str, int]
"""A request: ``(session, pass, doc)``."""


@dataclass(slots=True)
class Reconciled:
    """One planned, recorded or predicted request; ``residual`` is measured − predicted.

    ``row`` None: missing from the journals. ``predicted`` None: missing from the predictions.
    ``residual``: the three sources, stored tokens, loaded bytes. None: not comparable, because one
    of them is missing, the row has no sources, or there is no exact prediction.
    """

    key: Key
    is_planned: bool
    row: Row | None
    predicted: PredictedRow | None
    residual: dict[str, int] | None = field(init=False)

    def __post_init__(self) -> None:
        self.residual = _residual(self.row, self.predicted)

    @property
    def is_reconciled(self) -> bool:
        """Planned, complete, its sources sum to its prompt, and every residual is 0.

        Without an exact prediction there is no residual, and the sum is all there is to check.
        """
        row, predicted = self.row, self.predicted
        if not self.is_planned or row is None or predicted is None:
            return False
        is_as_predicted = not any((self.residual or {}).values())
        return row.complete and row.is_attributed and is_as_predicted


@dataclass(frozen=True, slots=True)
class Reconciliation:
    """The whole run: every request in plan order, what nobody planned where it was found.

    ``requests`` of a run folder are read anew at each walk, one at a time: a run may be of any
    length. ``notes`` are what the walk had to leave out: torn last lines.
    """

    run: str
    folder: Path
    plan: Plan
    manifest: dict[str, Any]
    requests: Iterable[Reconciled]
    notes: Sequence[str]

    def arm_of(self, session: str) -> str | None:
        """The arm the plan measures in ``session``; None for a session it does not have."""
        arms = enumerate(self.plan.order, start=1)
        return next((arm for i, arm in arms if session_name(i, arm) == session), None)

    def has_host(self, session: str) -> bool | None:
        """Whether the plan gives ``session`` a host tier; None for a session it does not have."""
        label = self.arm_of(session)
        return None if label is None else self.plan.arm(label).connector_class is not None

    @property
    def rows(self) -> list[Row]:
        """Every journalled row."""
        return [request.row for request in self.requests if request.row is not None]


@dataclass(frozen=True, slots=True)
class _FolderRequests:
    """The requests of a run folder, read anew at each walk."""

    folder: RunFolder
    plan: Plan
    notes: list[str]

    def __iter__(self) -> Iterator[Reconciled]:
        self.notes.clear()
        return join(
            planned_keys(self.plan),
            self.folder.rows(self.notes),
            walk_predictions(self.folder.path / PREDICTION_FILE),
            place=places(self.plan)[0],
        )


def _residual(row: Row | None, predicted: PredictedRow | None) -> dict[str, int] | None:
    if row is None or predicted is None or not row.is_attributed or not predicted.is_exact:
        return None
    pairs = (
        ("computed", row.computed, predicted.computed),
        ("gpu_hit", row.gpu_hit, predicted.gpu_hit),
        ("host_loaded", row.host_loaded, predicted.host_loaded),
        ("stored_tokens", row.stored_tokens, predicted.stored_tokens),
        ("loaded_bytes", row.loaded_bytes, predicted.transferred_bytes),
    )
    return {
        name: measured - expected
        for name, measured, expected in pairs
        if measured is not None and expected is not None
    }


def reconcile(folder: RunFolder) -> Reconciliation:
    """A run folder, ready to be walked; InputError when a file cannot be read, then or in a walk."""
    folder.refuse_imported()
    folder.check_seals()
    manifest = folder.read_manifest()
    plan = read_plan(folder.path / PLAN_FILE)
    notes: list[str] = []
    requests = _FolderRequests(folder, plan, notes)
    return Reconciliation(folder.name, folder.path, plan, manifest, requests, notes)


def places(plan: Plan) -> tuple[Callable[[Key], int | None], int]:
    """Where in the plan a request stands (0 first; None: nowhere), and how many the plan has."""
    work = plan.workload
    walks = {pass_name(i, order): (i, order) for i, order in enumerate(work.passes)}
    sessions: dict[str, tuple[int, int]] = {}
    total = 0
    for order, arm in enumerate(plan.order, start=1):
        documents = documents_of(plan, arm)
        sessions[session_name(order, arm)] = (total, documents)
        total += work.warmup_documents + len(walks) * documents

    def place(key: Key) -> int | None:
        session, name, doc = key
        if session not in sessions:
            return None
        first, documents = sessions[session]
        if name == WARMUP_PASS:
            return first + doc if doc < work.warmup_documents else None
        if name not in walks or doc >= documents:
            return None
        index, direction = walks[name]
        step = doc if direction == "fwd" else documents - 1 - doc
        return first + work.warmup_documents + index * documents + step

    return place, total


def join(
    planned: Iterable[Key],
    rows: Iterable[Row],
    predictions: Iterable[PredictedRow],
    *,
    place: Callable[[Key], int | None],
) -> Iterator[Reconciled]:
    """Planned requests in order, each with its row and prediction; the others where they come.

    One walk over each. ``place``: a key's position in ``planned``, None when it is not there. Rows
    and predictions must come in that order, as a session writes them; InputError otherwise.
    """
    row_at, prediction_at = _Placed(rows, place), _Placed(predictions, place)
    for here, key in enumerate(planned):
        if row_at.at is None or prediction_at.at is None:
            yield from _unplanned(row_at, prediction_at)
        yield Reconciled(key, True, row_at.take(here), prediction_at.take(here))
    yield from _unplanned(row_at, prediction_at)


def _unplanned(rows: "_Placed[Row]", predictions: "_Placed[PredictedRow]") -> Iterator[Reconciled]:
    for row in rows.unplanned():
        yield Reconciled(row.key, False, row, None)
    for predicted in predictions.unplanned():
        yield Reconciled(predicted.key, False, None, predicted)


Record = TypeVar("Record", Row, PredictedRow)


class _Placed(Generic[Record]):
    """Records and their places, one looked at ahead: ``at`` is its place, None for nowhere or none."""

    def __init__(self, records: Iterable[Record], place: Callable[[Key], int | None]) -> None:
        self._records: Iterator[Record] = iter(records)
        self._place = place
        self._last = -1
        self._advance()

    def take(self, here: int) -> Record | None:
        """The record at place ``here``, once; None when there is none."""
        record = self._next
        if record is None or self.at != here:
            return None
        self._advance()
        return record

    def unplanned(self) -> Iterator[Record]:
        """The records that come next and have no place."""
        while self._next is not None and self.at is None:
            record = self._next
            self._advance()
            yield record

    def _advance(self) -> None:
        self._next: Record | None = next(self._records, None)
        self.at = None if self._next is None else self._place(self._next.key)
        if self._next is None or self.at is None:
            return
        if self.at <= self._last:
            session, name, doc = self._next.key
            raise InputError(
                f"{session}/{name}/{doc} comes twice, or after a request that the plan sends later",
                hint="restore the journals and prediction.jsonl as the run wrote them",
            )
        self._last = self.at
