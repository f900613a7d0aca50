"""Join journal and prediction on the request key: every planned request, its sources, its residual.

Needs no engine: a run folder is enough, on any laptop.
"""

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Generic

from harness.errors import InputError
from harness.plan.plan import Plan, session_name
from harness.plan.requests import Key, PlannedRequests
from harness.record.folder import PREDICTION_FILE, RunFolder
from harness.record.journal import walk_predictions
from harness.record.manifest import Manifest
from harness.record.row import NUMBERS, AnyRow, PredictedRow, Row


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

    folder: Path
    plan: Plan
    manifest: Manifest
    requests: Iterable[Reconciled]
    notes: Sequence[str]

    def arm_of(self, session: str) -> str | None:
        """The arm the plan measures in ``session``; None for a session it does not have."""
        arms = enumerate(self.plan.order, start=1)
        return {session_name(i, arm): arm for i, arm in arms}.get(session)

    def has_host(self, session: str) -> bool | None:
        """Whether the plan gives ``session`` a host tier; None for a session it does not have."""
        arm = self.arm_of(session)
        return None if arm is None else self.plan.arm(arm).connector_class is not None


@dataclass(frozen=True, slots=True)
class _FolderRequests:
    """The requests of a run folder, read anew at each walk."""

    folder: RunFolder
    plan: Plan
    notes: list[str]

    def __iter__(self) -> Iterator[Reconciled]:
        self.notes.clear()
        return join(
            PlannedRequests(self.plan),
            self.folder.rows(self.notes),
            walk_predictions(self.folder.path / PREDICTION_FILE),
        )


def _residual(row: Row | None, predicted: PredictedRow | None) -> dict[str, int] | None:
    if row is None or predicted is None or not row.is_attributed or not predicted.is_exact:
        return None
    pairs = ((name, getattr(row, name), getattr(predicted, name)) for name in NUMBERS)
    return {
        name: measured - expected
        for name, measured, expected in pairs
        if measured is not None and expected is not None
    }


def reconcile(folder: RunFolder) -> Reconciliation:
    """A run folder, ready to be walked; InputError when a file cannot be read, then or in a walk."""
    plan = folder.read_plan()
    manifest = folder.read_manifest()
    notes: list[str] = []
    requests = _FolderRequests(folder, plan, notes)
    return Reconciliation(folder.path, plan, manifest, requests, notes)


def join(
    planned: Collection[Key], rows: Iterable[Row], predictions: Iterable[PredictedRow]
) -> Iterator[Reconciled]:
    """Planned requests in order, each with its row and prediction; the others where they come.

    One walk over each. Rows and predictions must come in the order of ``planned``, as a session
    writes them; InputError otherwise, once the walk is over.
    """
    row_at, prediction_at = _Ahead(rows, planned), _Ahead(predictions, planned)
    for key in planned:
        yield from _unplanned(row_at, prediction_at)
        yield Reconciled(key, True, row_at.pop(key), prediction_at.pop(key))
    yield from _unplanned(row_at, prediction_at)
    row_at.check_empty()
    prediction_at.check_empty()


def _unplanned(rows: "_Ahead[Row]", predictions: "_Ahead[PredictedRow]") -> Iterator[Reconciled]:
    for row in rows.pop_unplanned():
        yield Reconciled(row.key, False, row, None)
    for predicted in predictions.pop_unplanned():
        yield Reconciled(predicted.key, False, None, predicted)


class _Ahead(Generic[AnyRow]):
    """Records in their order, one looked at ahead."""

    def __init__(self, records: Iterable[AnyRow], planned: Collection[Key]) -> None:
        self._records: Iterator[AnyRow] = iter(records)
        self._planned = planned
        self._next: AnyRow | None = next(self._records, None)

    def pop(self, key: Key) -> AnyRow | None:
        """The next record if it is of the request ``key``, else None."""
        record = self._next
        if record is None or record.key != key:
            return None
        self._next = next(self._records, None)
        return record

    def pop_unplanned(self) -> Iterator[AnyRow]:
        """The records that come next and that nobody planned."""
        while self._next is not None and self._next.key not in self._planned:
            yield self._next
            self._next = next(self._records, None)

    def check_empty(self) -> None:
        """InputError for a record that was due before the one it came after."""
        if self._next is not None:
            session, name, doc = self._next.key
            raise InputError(
                f"{session}/{name}/{doc} comes twice, or after a request that the plan sends later",
                hint="restore the journals and prediction.jsonl as the run wrote them",
            )
