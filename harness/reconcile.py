"""Join journal and prediction on the request key: every planned request, its sources, its residual.

Needs no engine: a run folder is enough, on any laptop.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from harness.journal import PredictedRow, Row, read_predictions
from harness.plan import Plan, planned_keys, read_plan, session_name
from harness.runfolder import PLAN_FILE, PREDICTION_FILE, RunFolder

SOURCES = ("computed", "gpu_hit", "host_loaded")


@dataclass(frozen=True, slots=True)
class Reconciled:
    """One planned, recorded or predicted request; ``residual`` is measured − predicted.

    ``row`` None: missing from the journals. ``predicted`` None: missing from the predictions.
    ``residual`` None: not comparable, because one of them is missing or the row has no sources.
    """

    key: tuple[str, str, int]
    is_planned: bool
    row: Row | None
    predicted: PredictedRow | None

    @property
    def residual(self) -> dict[str, int] | None:
        """Measured − predicted: the three sources, stored tokens, loaded bytes."""
        if self.row is None or self.predicted is None or not self.row.is_attributed:
            return None
        measured = {
            **{source: getattr(self.row, source) for source in SOURCES},
            "stored_tokens": self.row.stored_tokens,
            "loaded_bytes": self.row.loaded_bytes,
        }
        expected = {
            **{source: getattr(self.predicted, source) for source in SOURCES},
            "stored_tokens": self.predicted.stored_tokens,
            "loaded_bytes": self.predicted.transferred_bytes,
        }
        return {
            name: value - expected[name] for name, value in measured.items() if value is not None
        }

    @property
    def is_reconciled(self) -> bool:
        """Planned, complete, attributed, and every residual 0."""
        residual = self.residual
        return (
            self.is_planned
            and self.row is not None
            and self.row.complete
            and residual is not None
            and not any(residual.values())
        )


@dataclass(frozen=True, slots=True)
class Reconciliation:
    """The whole run: every request in plan order (unplanned rows last).

    ``notes`` are what the reader had to leave out: torn last lines.
    """

    run: str
    folder: Path
    plan: Plan
    manifest: dict[str, Any]
    requests: tuple[Reconciled, ...]
    notes: tuple[str, ...]

    def arm_of(self, session: str) -> str | None:
        """The arm the plan measures in ``session``; None for a session it does not have."""
        arms = enumerate(self.plan.order, start=1)
        return next((arm for i, arm in arms if session_name(i, arm) == session), None)

    @property
    def rows(self) -> list[Row]:
        """Every journalled row."""
        return [request.row for request in self.requests if request.row is not None]


def reconcile(folder: RunFolder) -> Reconciliation:
    """Read a run folder and check it; InputError when a file cannot be read."""
    notes: list[str] = []
    folder.refuse_imported()
    folder.check_seals()
    manifest = folder.read_manifest()
    plan = read_plan(folder.path / PLAN_FILE)
    predictions = {row.key: row for row in read_predictions(folder.path / PREDICTION_FILE)}
    rows = {row.key: row for row in folder.rows(notes)}
    requests = join(planned_keys(plan), rows, predictions)
    return Reconciliation(folder.name, folder.path, plan, manifest, requests, tuple(notes))


def join(
    planned: Sequence[tuple[str, str, int]],
    rows: dict[tuple[str, str, int], Row],
    predictions: dict[tuple[str, str, int], PredictedRow],
) -> tuple[Reconciled, ...]:
    """Planned requests in plan order, then rows and predictions that no plan asked for."""
    known = set(planned)
    others = dict.fromkeys(key for key in (*rows, *predictions) if key not in known)
    return tuple(
        Reconciled(key, key in known, rows.get(key), predictions.get(key))
        for key in [*planned, *others]
    )


def request_json(request: Reconciled) -> dict[str, Any]:
    """One entry of ``reconcile.json``; null where nothing was measured or predicted."""
    session, pass_name, doc = request.key
    row = request.row
    return {
        "session": session,
        "pass": pass_name,
        "doc": doc,
        "complete": row.complete if row else None,
        "measured": {source: getattr(row, source) for source in SOURCES} if row else None,
        "predicted": (
            {source: getattr(request.predicted, source) for source in SOURCES}
            if request.predicted
            else None
        ),
        "residual": request.residual,
        "reconciled": request.is_reconciled,
    }
