"""What an imported file says against itself; without a plan, its sessions are held to each other."""

from collections.abc import Iterator
from dataclasses import dataclass, field

from harness.errors import InputError
from harness.plan.arms import BASELINE, CONTROL, compared
from harness.plan.plan import BUILT_IN_ARMS
from harness.record.row import Sample
from harness.verdict import finding_table as table
from harness.verdict.schema import Finding

Walk = tuple[str, str]
"""A session and a pass."""


@dataclass(slots=True)
class ImportAccount:
    """The rows of a file, counted; of each walk its documents.

    ``runs``: values of the field ``run``, which a file of one run has one of, or none.
    ``is_assumed``: the sessions had to be, because the rows name none.
    """

    recorded: int = 0
    failed: int = 0
    first_failed: Sample | None = None
    first_of_zero: Sample | None = None
    arms: dict[str, str] = field(default_factory=dict)  # by session
    documents: dict[Walk, set[int]] = field(default_factory=dict)
    runs: set[str] = field(default_factory=set)
    is_assumed: bool = False

    def add(self, row: Sample, run: object) -> None:
        """Count one row; ``run``: its field of that name, as the file has it."""
        self.recorded += 1
        self.arms[row.session] = row.config
        self.documents.setdefault((row.session, row.pass_name), set()).add(row.doc)
        self.runs |= {str(run)} if run is not None else set()
        if not row.complete:
            self.failed += 1
            self.first_failed = self.first_failed or row
        if 0 in (row.ttft_ms, row.total_ms):
            self.first_of_zero = self.first_of_zero or row

    def findings(self) -> list[Finding]:
        """Every check, errors first."""
        return sorted(self._found(), key=lambda finding: finding.severity != "error")

    def _found(self) -> Iterator[Finding]:
        if failed := self.first_failed:
            yield table.failed_requests(
                self.failed, first=_name(failed), error=failed.error, recorded=self.recorded
            )
        yield from self._missing()
        present = set(self.arms.values())
        base, treatment = compared(self.arms.values())
        if base not in present or treatment is None:
            yield table.nothing_compared(sorted(present))
        if self.first_of_zero:
            yield table.times_of_zero(_name(self.first_of_zero))
        if len(self.runs) > 1:
            yield table.several_runs(sorted(self.runs))
        if self.is_assumed:
            yield table.sessions_assumed()

    def _missing(self) -> Iterator[Finding]:
        """Requests that other sessions have; a control may walk over fewer documents."""
        sessions = [session for session, arm in self.arms.items() if arm != CONTROL]
        asked: dict[str, set[int]] = {}
        for (session, name), documents in self.documents.items():
            if session in sessions:
                asked.setdefault(name, set()).update(documents)
        for session in sessions:
            for name, documents in asked.items():
                if missing := documents - self.documents.get((session, name), set()):
                    first = f"{session}/{name}/{min(missing)}"
                    yield table.unequal_sessions(len(missing), of=len(documents), first=first)


def refuse_misspelt(arm: str, others: set[str], where: str) -> None:
    """InputError for an arm that is another one, or a usual one, but for case or blanks."""
    for known in (BASELINE, CONTROL, *BUILT_IN_ARMS, *sorted(others)):
        if arm != known and arm.strip().casefold() == known.strip().casefold():
            raise InputError(
                f"{where}: config is {arm!r}, which is {known!r} but for case or blanks",
                hint="call an arm by one name in every row",
            )


def _name(row: Sample) -> str:
    return f"{row.session}/{row.pass_name}/{row.doc}"
