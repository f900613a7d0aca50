"""``kvcliff report``: a run as one HTML file."""

from pathlib import Path
from typing import Annotated

import typer

from harness import console
from harness.commands.arguments import RunPath
from harness.commands.derived import refresh
from harness.errors import InputError


def report(
    run: RunPath,
    out: Annotated[
        Path | None,
        typer.Option(help="HTML file to write.  [default: RUN/report.html]", show_default=False),
    ] = None,
    png: Annotated[bool, typer.Option("--png", help="Also write each chart as PNG.")] = False,
    svg: Annotated[bool, typer.Option("--svg", help="Also write each chart as SVG.")] = False,
    md: Annotated[
        bool, typer.Option("--md", help="Also write Markdown for a pull request.")
    ] = False,
) -> None:
    """Write the report of a run as one HTML file."""
    from harness.files import refuse_evidence, refuse_missing_folder
    from harness.report.html import write_report

    if out is not None:
        refuse_missing_folder(out)
    out = out or run / "report.html"
    if out.suffix != ".html":
        raise InputError(f"--out is {str(out)!r}; the report's name must end in .html")
    refuse_evidence(out)
    refresh(run)
    for path in write_report(run, out, png=png, svg=svg, markdown=md):
        console.show_text(str(path))
