"""The run folder: where the files of one run are, and its manifest."""

import fcntl
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import BinaryIO

from harness.errors import InputError
from harness.plan.files import read_plan
from harness.plan.plan import Plan
from harness.record.journal import walk_journal
from harness.record.manifest import Manifest, SessionRecord, read_manifest
from harness.record.row import Row
from harness.record.seals import Seals, check_sealed, unproven
from harness.record.versions import JsonObject, plan_as_today

PLAN_FILE = "plan.toml"
PREDICTION_FILE = "prediction.jsonl"
LEDGER_FILE = "processes.jsonl"
ROWS_FILE = "ttft.jsonl"
SUMMARY_FILE = "summary.json"
RECONCILE_FILE = "reconcile.json"


@dataclass(frozen=True, slots=True)
class RunFolder:
    """Paths inside ``results/<UTC>-<plan id>/``."""

    path: Path

    @classmethod
    def begun_now(cls, results: Path, plan_id: str) -> "RunFolder":
        """The folder of a run that begins now; not there yet."""
        return cls(results / f"{datetime.now(UTC):%Y%m%dT%H%M%SZ}-{plan_id}")

    def create(self) -> None:
        """Make the folder; InputError where it is there."""
        try:
            self.path.mkdir(parents=True)
        except FileExistsError:
            raise InputError(
                f"{self.path} exists already: a run of this plan started in this very second",
                hint="start again",
            ) from None

    @property
    def name(self) -> str:
        """The folder's own name; the field ``run`` of its rows."""
        return self.path.name

    def journal(self, session: str) -> Path:
        return self.path / f"journal-{session}.jsonl"

    def journals(self) -> list[Path]:
        """Every journal there is, in session order."""
        paths = self.path.glob("journal-*.jsonl")
        return sorted(paths, key=lambda path: (len(path.stem.split("-")[1]), path.name))

    @property
    def ledger(self) -> Path:
        """Which processes the run started and ended."""
        return self.path / LEDGER_FILE

    def rows(self, notes: list[str] | None = None) -> Iterator[Row]:
        """Every row of every journal, in session order, one at a time.

        Torn last lines are said in ``notes``. Raises InputError for a row of another run or another
        session than its file's, and as ``check_seals``.
        """
        seals = self.check_seals()
        for path in self.journals():
            yield from _rows_of(path, seals, notes)

    def session_rows(self, session: str, notes: list[str] | None = None) -> list[Row]:
        """The rows of one session's journal, as ``rows``."""
        return list(_rows_of(self.journal(session), self.check_seals(), notes))

    def is_being_measured(self) -> bool:
        """Whether a writer holds the run's lock; never where the plan is gone."""
        try:
            with (self.path / PLAN_FILE).open("rb") as file:
                return not _locks(file, fcntl.LOCK_SH)
        except FileNotFoundError:
            return False

    def check_seals(self) -> Seals:
        """What a row must agree with; InputError when plan or predictions are not the run's own.

        Whoever reads the plan or rows comes through here. An imported run has neither, and is
        refused.
        """
        manifest = self.read_manifest()
        if manifest.imported_from is not None:
            raise InputError(
                f"{self.path} was imported: it has measurements, but no plan and no journals",
                hint="kvcliff report shows what it has",
            )
        check_sealed(self.path, manifest, (PLAN_FILE, PREDICTION_FILE))
        return Seals(manifest.run, unproven(manifest, self._plan(), where=self.path))

    @contextmanager
    def lock(self) -> Iterator[None]:
        """Hold the run for one writer; InputError when another process measures it already."""
        with (self.path / PLAN_FILE).open("rb") as file:
            while not _locks(file, fcntl.LOCK_EX):
                # Those who only look share the lock, for microseconds; a writer shares it with none.
                if not _locks(file, fcntl.LOCK_SH):
                    raise InputError(
                        f"{self.path} is being measured by another process",
                        hint="wait for it to end",
                    )
            yield

    def read_manifest(self) -> Manifest:
        """The run's manifest; InputError when it is missing or not one."""
        return read_manifest(self.path)

    def read_plan(self) -> Plan:
        """The plan that was measured; InputError when it cannot be read, or as ``check_seals``."""
        self.check_seals()
        return self._plan()

    def _plan(self) -> Plan:
        return read_plan(self.path / PLAN_FILE, migrate=plan_as_today)

    def note_session(self, session: str, facts: JsonObject) -> None:
        manifest = self.read_manifest()
        known = manifest.sessions[session].as_json() if session in manifest.sessions else {}
        manifest.sessions[session] = SessionRecord.model_validate({**known, **facts})
        manifest.write(self.path)


def _locks(file: BinaryIO, how: int) -> bool:
    """Take a lock on ``file`` at once, in place of what it held; False where another's forbids it."""
    try:
        fcntl.flock(file, how | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _rows_of(path: Path, seals: Seals, notes: list[str] | None) -> Iterator[Row]:
    for row in walk_journal(path, notes if notes is not None else []):
        seals.check_row(row, path)
        yield row
