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
    """Make both files anew, of an imported run from its copy of what was imported.

    InputError where they cannot be written and those that are there say something else.
    """
    from harness.record.folder import RunFolder
    from harness.verdict.importing import publish_imported
    from harness.verdict.publish import publish

    folder = RunFolder(run)
    if folder.read_manifest().imported_from is None:
        publish(folder, write=_write_or_hold)
    else:
        publish_imported(folder, write=_write_or_hold)


def show_summary(folder: "RunFolder", *, as_json: bool = False, gate: bool = False) -> int:
    """Show the tables, findings and verdict of a run made anew; returns the exit code.

    1: a check failed. 4: none did, ``gate`` was asked for, and the verdict is not ``supported``.
    """
    from harness.report.tables import show_findings, show_run, show_verdict
    from harness.verdict.findings import has_failed

    evidence = publish_again(folder)
    if as_json:
        console.show_json(evidence.summary.as_json())
    else:
        show_run(evidence.summary, evidence.reconciliation)
    show_findings(evidence.reconciliation.findings)
    if not as_json:
        show_verdict(evidence.summary.decision)
    if has_failed(evidence.reconciliation.findings):
        return 1
    return 4 if gate and evidence.summary.decision.verdict != "supported" else 0


def _write(path: Path, content: Any) -> bool:
    """Write a derived file; a run on read-only storage can be read all the same, and says so."""
    from harness.files import write_json

    try:
        write_json(path, content)
    except OSError as error:
        if error.errno not in (errno.EROFS, errno.EACCES):
            raise
        console.say(f"not written: {path}: {error.strerror}")
        return False
    return True


def _write_or_hold(path: Path, content: Any) -> None:
    """``_write``, or InputError for a file that says something else and stays."""
    from harness.errors import InputError
    from harness.files import load_json

    if _write(path, content):
        return
    if not path.is_file() or load_json(path.read_bytes(), where=str(path)) != content:
        raise InputError(
            f"{path} is not what its run says, and cannot be written anew",
            hint="copy the run folder to where it can be written",
        )
