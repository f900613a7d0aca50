"""What ``kvcliff doctor`` and left-over servers show in a terminal."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich import box
from rich.table import Table

from harness.console import say
from harness.terminal import out
from servers.processes import Recorded


def show_checks(checks: Sequence[dict[str, Any]]) -> None:
    """What the doctor found, on stdout."""
    table = Table(box=box.SIMPLE_HEAD)
    for heading in ("", "what", "found", "what to do"):
        table.add_column(heading)
    for check in checks:
        mark = {"ok": "ok", "warning": "warn", "error": "FAIL"}[check["status"]]
        table.add_row(mark, check["what"], check["found"], check["remedy"] or "")
    out.print(table)


def show_leftovers(leftovers: Mapping[Path, Sequence[Recorded]]) -> None:
    """Processes an earlier, killed run left behind, by run folder, on stderr."""
    for run, processes in leftovers.items():
        say(f"servers of the run in {run} are still alive:")
        for left in processes:
            say(f"  pid {left.identity.pid}: {left.role} of session {left.session}: {left.command}")
