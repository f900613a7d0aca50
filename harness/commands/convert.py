"""``kvcliff convert``: a trace written for another tool."""

from pathlib import Path
from typing import Annotated

import typer

from harness.commands.arguments import AsJson
from harness.commands.trace_arguments import (
    ChunkTokens,
    ModelArguments,
    TraceArguments,
    inputs_of,
    load_trace,
    model_config,
    show_answer,
)


def convert(
    source: TraceArguments,
    out: Annotated[Path, typer.Argument(help="File to write.")],
    *,
    form: Annotated[str, typer.Option("--format", help="One of lmcache, mooncake.")] = "lmcache",
    chunk_tokens: ChunkTokens = None,
    size: ModelArguments,
    as_json: AsJson = False,
) -> None:
    """Write a trace for another tool."""
    from harness.files import check_outputs
    from harness.traces.convert import convert_trace

    folder = model_config(size.model)
    check_outputs([out], inputs_of(source.trace, folder))
    loaded = load_trace(source, model=folder, kv_dtype=size.kv_dtype)
    content = convert_trace(loaded, out, form, chunk_tokens=chunk_tokens)
    show_answer(content, as_json=as_json)
