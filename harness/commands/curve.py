"""``kvcliff curve``: hits at every GPU capacity."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from harness.commands.trace_arguments import (
    CAPACITIES,
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


@dataclass(frozen=True, slots=True)
class CurveArguments:
    """What ``curve`` alone can be asked."""

    gpu: Annotated[str | None, typer.Option("--gpu", "--at", help=f"GPU {CAPACITIES}.")] = None
    target: Annotated[
        list[float] | None, typer.Option(help="Capacity for this share of the ideal hits.")
    ] = None
    policy: Annotated[
        list[str] | None, typer.Option(help="Replay vllm, fifo, lru, mru, lfu, arc or belady too.")
    ] = None
    bands: Annotated[bool, typer.Option("--bands", help="Bands where only bands are honest.")] = (
        False
    )
    concurrency: Annotated[
        Path | None, typer.Option(help="CSV of request,start_s,finish_s: overlapping requests.")
    ] = None
    decode: Annotated[bool, typer.Option("--decode", help="Generated tokens take blocks too.")] = (
        False
    )
    lmcache_order: Annotated[
        bool, typer.Option("--lmcache-order", help="Touch forward, as LMCache's simulator does.")
    ] = False
    mark: Annotated[
        str | None, typer.Option(help="Your GPU's capacity, as for --gpu: marked in the plot.")
    ] = None
    measured: Annotated[
        Path | None, typer.Option(help="CSV of gpu_blocks,hit_share: points to plot too.")
    ] = None


def curve(
    source: TraceArguments,
    asked: CurveArguments,
    *,
    last_token: LastToken = False,
    warm_up: WarmUp = 0.0,
    starts: StartArguments,
    size: ModelArguments,
    outputs: OutputArguments,
) -> None:
    """Hits at every GPU capacity, exactly."""
    from harness.traces.curve import read_measured, run_curve
    from harness.traces.plots import cliff
    from harness.traces.serving import Serving

    model = model_config(size.model)
    check_output_files(outputs, inputs_of(source.trace, model, asked.measured, asked.concurrency))
    points = read_measured(asked.measured) if asked.measured else ()
    loaded = load_trace(source, starts, model, size.kv_dtype)
    marked = None if asked.mark is None else loaded.capacity(asked.mark)
    forward = asked.lmcache_order
    run = run_curve(
        loaded,
        Serving(last_token=last_token, decode=asked.decode, warm_up=warm_up, forward=forward),
        at=asked.gpu,
        targets=asked.target or (),
        policies=asked.policy or (),
        with_bands=asked.bands,
        concurrency=asked.concurrency,
    )
    write_and_show(run.json, lambda: cliff(run, mark_blocks=marked, measured=points), outputs)
