"""``kvcliff compile``: a trace as a small file that loads at once."""

from pathlib import Path
from typing import Annotated

import typer

from harness.commands.arguments import AsJson
from harness.commands.trace_arguments import TraceArguments, inputs_of, show_answer, trace_options


def compile_trace(
    source: TraceArguments,
    out: Annotated[Path, typer.Argument(help="Where to write it: NAME.kvtrace.npz.")],
    as_json: AsJson = False,
) -> None:
    """Compile a trace to a small file."""
    from harness.files import check_outputs
    from harness.traces.compile import compile_trace as compile_file
    from harness.traces.tables import read_progress

    check_outputs([out], inputs_of(source.trace))
    with read_progress() as progress:
        content = compile_file(source.trace, out, trace_options(source), progress=progress)
    show_answer(content, as_json=as_json)
