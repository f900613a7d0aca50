"""``kvcliff import``: someone else's measurements as a run."""

from pathlib import Path
from typing import Annotated

import typer

from harness import console
from harness.commands.arguments import RESULTS


def import_rows(
    source: Annotated[Path, typer.Argument(help="A ttft.jsonl that kvcliff did not write.")],
    results: Annotated[Path, typer.Option(help="Folder of the run folders.")] = RESULTS,
) -> None:
    """Make a run folder from someone else's measurements; exit code 1 when a check fails."""
    from harness.report.tables import show_findings
    from harness.verdict.findings import has_failed
    from harness.verdict.importing import import_rows as import_file
    from harness.verdict.schema import read_published

    folder = import_file(source, results)
    console.show_text(str(folder))
    findings = read_published(folder)[1].findings
    show_findings(findings)
    raise typer.Exit(1 if has_failed(findings) else 0)
