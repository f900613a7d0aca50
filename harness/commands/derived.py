"""A run's derived files, made anew from its journals before anything of them is shown."""

import errno
from pathlib import Path
from typing import TYPE_CHECKING, Any

from harness import console

if TYPE_CHECKING:
    from harness.record.folder import RunFolder
    from harness.verdict.publish import Evidence


def publish_again(folder: "RunFolder") -> "Evidence":
    """Reconcile and summarize a run, and write both files."""
    from harness.verdict.publish import publish

    return publish(folder, write=_write)


def refresh(run: Path) -> None:
    """``publish_again``, except of an imported run: it has no plan, its files are as imported."""
    from harness.record.folder import PLAN_FILE, RunFolder

    if (run / PLAN_FILE).exists():
        publish_again(RunFolder(run))


def show_summary(folder: "RunFolder", *, as_json: bool = False) -> bool:
    """Show the tables and findings of a run made anew; True when a check failed."""
    from harness.report.tables import show_findings, show_run
    from harness.verdict.findings import has_failed

    evidence = publish_again(folder)
    if as_json:
        console.show_json(evidence.summary.as_json())
    else:
        show_run(evidence.summary, evidence.reconciliation)
    show_findings(evidence.reconciliation.findings)
    return has_failed(evidence.reconciliation.findings)


def _write(path: Path, content: Any) -> None:
    """Write a derived file; a run on read-only storage can be read all the same, and says so."""
    from harness.files import write_json

    try:
        write_json(path, content)
    except OSError as error:
        if error.errno not in (errno.EROFS, errno.EACCES):
            raise
        console.say(f"not written: {path}: {error.strerror}")
