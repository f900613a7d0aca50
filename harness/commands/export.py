"""``kvcliff export``: a run for other tools."""

from pathlib import Path
from typing import Annotated

import typer

from harness import console
from harness.commands.arguments import RunPath


def export(
    run: RunPath,
    out: Annotated[Path, typer.Argument(help="File, or folder for vllm-bench and llmd.")],
    form: Annotated[
        str, typer.Option("--format", help="One of csv, parquet, vllm-bench, llmd.")
    ] = "csv",
) -> None:
    """Write a run in a format other tools read."""
    from harness.files import refuse_evidence
    from harness.report.export import export as export_rows

    if not out.is_dir():
        refuse_evidence(out)
    notes: list[str] = []
    for path in export_rows(run, form, out, notes):
        console.show_text(str(path))
    for note in notes:
        console.say(note)
