"""``kvcliff compare``: what changed between runs."""

from pathlib import Path
from typing import Annotated

import typer

from harness import console
from harness.commands.arguments import AsJson
from harness.commands.derived import refresh


def compare(
    runs: Annotated[
        list[Path], typer.Argument(help="Two or more run folders, the first is the base.")
    ],
    as_json: AsJson = False,
) -> None:
    """Say what changed between runs.

    Runs that must not be compared are refused.
    """
    from harness.report.compare import compare as compare_runs
    from harness.report.tables import show_comparison

    for run in runs:
        refresh(run)
    comparison = compare_runs(runs)
    if as_json:
        console.show_json(comparison.as_json())
    else:
        show_comparison(comparison)
