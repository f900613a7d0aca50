"""``kvcliff import``: someone else's measurements as a run."""

from pathlib import Path
from typing import Annotated

import typer

from harness import console
from harness.commands.arguments import RESULTS
from sim.split import USUAL_UNITS, Units


def import_rows(
    source: Annotated[Path, typer.Argument(help="A ttft.jsonl that kvcliff did not write.")],
    results: Annotated[Path, typer.Option(help="Folder of the run folders.")] = RESULTS,
    block_size: Annotated[
        int, typer.Option(min=1, help="Tokens of a KV block.")
    ] = USUAL_UNITS.block,
    chunk_tokens: Annotated[
        int, typer.Option(min=1, help="Tokens of a chunk of the host tier.")
    ] = USUAL_UNITS.chunk,
) -> None:
    """Make a run folder from someone else's measurements; exit code 1 when a check fails.

    A block and a chunk tell documents found whole from those found in part.
    """
    from harness.report.tables import show_findings
    from harness.verdict.findings import has_failed
    from harness.verdict.importing import import_rows as import_file
    from harness.verdict.schema import read_published

    folder = import_file(source, results, Units(block_size, chunk_tokens))
    console.say(
        f"assumed: blocks of {block_size} tokens (--block-size) and chunks of {chunk_tokens} tokens "
        "(--chunk-tokens)"
    )
    console.show_text(str(folder))
    findings = read_published(folder)[1].findings
    show_findings(findings)
    raise typer.Exit(1 if has_failed(findings) else 0)
