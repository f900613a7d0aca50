"""``kvcliff summarize``: the tables of a run."""

import typer

from harness.commands.arguments import AsJson, Gate, RunPath
from harness.commands.derived import show_summary


def summarize(run: RunPath, gate: Gate = False, as_json: AsJson = False) -> None:
    """Show the tables of a run, and make its summary.json and reconcile.json anew."""
    from harness.record.folder import RunFolder

    raise typer.Exit(show_summary(RunFolder(run), as_json=as_json, gate=gate))
