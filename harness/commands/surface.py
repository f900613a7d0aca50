"""``kvcliff surface``: token sources at every pair of GPU and host capacities."""

from typing import Annotated

import typer

from harness.commands.trace_arguments import (
    CAPACITIES,
    ChunkTokens,
    LastToken,
    ModelArguments,
    OutputArguments,
    StartArguments,
    TraceArguments,
    WarmUp,
    check_output_files,
    inputs_of,
    load_trace,
    model_config,
    write_and_show,
)
from sim.tiers.settings import DEFAULT_KIND, HostSettings

_DEFAULT = HostSettings()


def surface(
    source: TraceArguments,
    *,
    gpu: Annotated[
        str | None,
        typer.Option(help=f"GPU {CAPACITIES}; one alone plots token sources."),
    ] = None,
    host: Annotated[str | None, typer.Option(help="Host capacities, as for --gpu.")] = None,
    host_kind: Annotated[
        str, typer.Option(help="Kind of host tier: lmcache-mp, lmcache or native.")
    ] = DEFAULT_KIND,
    watermark: Annotated[
        float, typer.Option(help="lmcache-mp alone: it evicts from this share of its size on.")
    ] = _DEFAULT.watermark,
    evict_ratio: Annotated[
        float, typer.Option(help="lmcache-mp alone: the share of its chunks it then evicts.")
    ] = _DEFAULT.evict_ratio,
    target: Annotated[
        list[float] | None,
        typer.Option(help="Host capacity for this share of what endless tiers serve."),
    ] = None,
    chunk_tokens: ChunkTokens = None,
    last_token: LastToken = False,
    warm_up: WarmUp = 0.0,
    starts: StartArguments,
    size: ModelArguments,
    outputs: OutputArguments,
) -> None:
    """Token sources at every GPU x host capacity."""
    from harness.traces.plots import surface_chart
    from harness.traces.serving import Serving
    from harness.traces.surface import run_surface

    model = model_config(size.model)
    check_output_files(outputs, inputs_of(source.trace, model))
    run = run_surface(
        load_trace(source, starts, model, size.kv_dtype),
        Serving(last_token=last_token, warm_up=warm_up),
        gpu=gpu,
        host=host,
        chunk_tokens=chunk_tokens,
        host_kind=host_kind,
        watermark=watermark,
        evict_ratio=evict_ratio,
        targets=target or (),
    )
    write_and_show(run.json, lambda: surface_chart(run), outputs)
