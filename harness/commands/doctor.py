"""``kvcliff doctor``: can this machine run a plan, and what to do if not."""

from pathlib import Path
from typing import Annotated

import typer

from harness import console
from harness.commands.arguments import RESULTS, AsJson, PlanName


def doctor(
    plan: PlanName = "demo",
    as_json: AsJson = False,
    results: Annotated[
        Path, typer.Option(help="Folder of the run folders, searched for left-over servers.")
    ] = RESULTS,
) -> None:
    """Say whether this machine can run a plan."""
    from harness.machine.doctor import check_machine
    from harness.machine.tables import show_checks

    checks = check_machine(results, plan)
    if as_json:
        console.show_json({"schema": 1, "checks": checks})
    else:
        show_checks(checks)
    raise typer.Exit(3 if any(check["status"] == "error" for check in checks) else 0)
