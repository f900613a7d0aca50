"""What holds a run's plan and predictions to its rows: digests in the manifest, and the plan's id.

Every row names its run, a run's name ends in the id of its plan, and the id is a digest of the plan
and of the model's shape. Whoever can write every file of a run, and keeps its journals' counters
and times in agreement, can still forge it: only a copy elsewhere shows that.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from harness.errors import InputError
from harness.plan.lookup import shape_of
from harness.plan.plan import Plan, plan_id_of
from harness.record.manifest import Manifest
from harness.record.row import Row
from servers.tinymodel import tiny_shape

_RESTORE = "restore the file, or start a new run"


def file_digest(path: Path) -> str:
    """SHA-256 of a file's bytes in hex; InputError when it cannot be read."""
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise InputError(f"cannot read {path}: {error.strerror}") from None


def check_sealed(run: Path, manifest: Manifest, names: Sequence[str]) -> None:
    """InputError unless the files ``names``, and no others, are as the manifest has sealed them.

    A manifest without any seal is left to ``unproven``.
    """
    if manifest.sealed and set(manifest.sealed) != set(names):
        raise InputError(
            f"{run / 'manifest.json'}: sealed names {', '.join(sorted(manifest.sealed))}, but a run "
            f"seals {' and '.join(names)}",
            hint=_RESTORE,
        )
    for name, digest in manifest.sealed.items():
        if file_digest(run / name) != digest:
            raise InputError(
                f"{run / name} was changed after the run began: what was measured no longer "
                "answers it",
                hint=_RESTORE,
            )


def unproven(manifest: Manifest, plan: Plan, *, where: Path) -> str | None:
    """Why nothing holds ``plan`` to the rows, as in the first runs alone; None where it is held.

    InputError where the run's name does not end in the manifest's ``plan_id``.
    """
    named = f"{where / 'manifest.json'}: plan_id is {manifest.plan_id!r}"
    if not manifest.run.endswith(f"-{manifest.plan_id}"):
        raise InputError(f"{named}, but the run is called {manifest.run!r}", hint=_RESTORE)
    if not manifest.sealed:
        return f"{where / 'manifest.json'} seals no file"
    shape = _shape_of(manifest, plan)
    found = manifest.plan_id if shape is None else plan_id_of(plan, shape)
    return None if found == manifest.plan_id else f"{named}, but that of plan.toml is {found!r}"


@dataclass(frozen=True, slots=True)
class Seals:
    """What a row must agree with. ``run``: its name; ``unproven``: as the function says."""

    run: str
    unproven: str | None

    def check_row(self, row: Row, journal: Path) -> None:
        """InputError for a row of another run, session or plan than the journal it stands in."""
        session = journal.stem.removeprefix("journal-")
        if (row.run, row.session) != (self.run, session):
            raise InputError(
                f"{journal}: row {row.seq} belongs to session {row.session!r} of run {row.run!r}, "
                f"this is the journal of {session!r} of {self.run!r}",
                hint="keep only the journals this run wrote",
            )
        # The first runs sealed nothing, or a plan whose id was taken another way; they recorded
        # no connector.
        if self.unproven is not None and row.connector is not None:
            raise InputError(f"{self.unproven}: one of the two was changed", hint=_RESTORE)


def _shape_of(manifest: Manifest, plan: Plan) -> bytes | None:
    """config.json of the model that was measured; None where nobody kept it."""
    if manifest.shape is not None:
        return manifest.shape.encode()
    if plan.model.path == "tiny":
        return tiny_shape()
    known = shape_of(plan.model.path)
    return known.read_bytes() if known else None
