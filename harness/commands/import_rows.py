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
    """Make a run folder from someone else's measurements."""
    from harness.verdict.importing import import_rows as import_file

    console.show_text(str(import_file(source, results)))
