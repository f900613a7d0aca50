"""The trace commands: ``kvcliff compile``, ``curve``, ``surface``, ``convert``, ``describe``.

numpy, numba and the plots are imported inside the commands: no other command needs them.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from harness import console
from harness.files import check_outputs
from harness.traces.arguments import (
    AsJson,
    LastToken,
    ModelArguments,
    OutputArguments,
    StartArguments,
    TraceArguments,
    WarmUp,
    spread_out,
)
from harness.traces.tables import ReadProgress, show_trace

if TYPE_CHECKING:
    from collections.abc import Callable

    from harness.charting import Chart
    from harness.traces.load import Loaded, TraceOptions


def add_to(app: typer.Typer) -> None:
    """Register the trace commands with the command line ``app``."""
    app.command(name="compile")(spread_out(compile_command))
    for command in (curve, surface, convert, describe):
        app.command()(spread_out(command))


def compile_command(
    source: TraceArguments,
    output: Annotated[Path, typer.Argument(help="Where to write it: NAME.kvtrace.npz.")],
    as_json: AsJson = False,
) -> None:
    """Compile a trace to a small file."""
    from harness.traces.compile import compile_trace

    check_outputs([output], _inputs(source.trace))
    with ReadProgress() as reading:
        content = compile_trace(source.trace, output, _options(source), progress=reading.told)
    _show(content, as_json=as_json)


def describe(source: TraceArguments, as_json: AsJson = False) -> None:
    """Say what a trace holds."""
    from harness.traces.describe import describe_trace

    with ReadProgress() as reading:
        content = describe_trace(source.trace, _options(source), progress=reading.told)
    _show(content, as_json=as_json)


def convert(
    source: TraceArguments,
    output: Annotated[Path, typer.Argument(help="File to write.")],
    *,
    target: Annotated[str, typer.Option("--to", help="lmcache or mooncake.")] = "lmcache",
    chunk_tokens: Annotated[
        int | None, typer.Option(help="Tokens of a written chunk.", min=1)
    ] = None,
    size: ModelArguments,
    as_json: AsJson = False,
) -> None:
    """Write a trace for another tool."""
    from harness.traces.convert import convert_trace

    folder = _model(size.model)
    check_outputs([output], _inputs(source.trace, folder))
    with ReadProgress() as reading:
        content = convert_trace(
            source.trace,
            output,
            target,
            _options(source),
            chunk_tokens=chunk_tokens,
            model=folder,
            kv_dtype=size.kv_dtype,
            progress=reading.told,
        )
    _show(content, as_json=as_json)


@dataclass(frozen=True, slots=True)
class CurveArguments:
    """What ``curve`` alone can be asked."""

    at: Annotated[
        str | None,
        typer.Option(help="Capacities: 100 (blocks), 2M tokens, 40 GiB, LOW..HIGH:N, commas."),
    ] = None
    target: Annotated[
        list[float] | None, typer.Option(help="Capacity for this share of the ideal hits.")
    ] = None
    policy: Annotated[
        list[str] | None, typer.Option(help="Replay fifo, lru, mru, lfu, arc or belady too.")
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
        str | None, typer.Option(help="Your GPU's capacity, as for --at: marked in the plot.")
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

    model = _model(size.model)
    _check_outputs(outputs, _inputs(source.trace, model, asked.measured, asked.concurrency))
    points = read_measured(asked.measured) if asked.measured else ()
    loaded = _load(source, starts, model, size.kv_dtype)
    marked = None if asked.mark is None else loaded.capacity(asked.mark)
    forward = asked.lmcache_order
    run = run_curve(
        loaded,
        Serving(last_token=last_token, decode=asked.decode, warm_up=warm_up, forward=forward),
        at=asked.at,
        targets=asked.target or (),
        policies=asked.policy or (),
        with_bands=asked.bands,
        concurrency=asked.concurrency,
    )
    _give(run.json, lambda: cliff(run, mark_blocks=marked, measured=points), outputs)


def surface(
    source: TraceArguments,
    *,
    gpu: Annotated[
        str | None,
        typer.Option(help="GPU capacities, as for `curve --at`; one alone plots token sources."),
    ] = None,
    host: Annotated[str | None, typer.Option(help="Host capacities, likewise.")] = None,
    chunk_tokens: Annotated[
        int | None, typer.Option(help="Tokens of a host chunk; LMCache's default is 256.")
    ] = None,
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

    model = _model(size.model)
    _check_outputs(outputs, _inputs(source.trace, model))
    run = run_surface(
        _load(source, starts, model, size.kv_dtype),
        Serving(last_token=last_token, warm_up=warm_up),
        gpu=gpu,
        host=host,
        chunk_tokens=chunk_tokens,
    )
    _give(run.json, lambda: surface_chart(run), outputs)


def _options(source: TraceArguments, starts: StartArguments | None = None) -> "TraceOptions":
    from harness.traces.load import TraceOptions

    starts = starts or StartArguments()
    return TraceOptions(
        block_tokens=source.block_tokens,
        full_blocks=source.full_blocks,
        spread_hours=starts.spread_hours,
        seed=starts.seed,
        time_scale=starts.time_scale,
    )


def _model(name: str | None) -> Path | None:
    from harness.traces.load import input_errors
    from sim.geometry import find_model

    if name is None:
        return None
    with input_errors():
        return find_model(name)


def _load(
    source: TraceArguments, starts: StartArguments, model: Path | None, kv_dtype: str
) -> "Loaded":
    from harness.traces.load import load

    with ReadProgress() as reading:
        return load(
            source.trace,
            _options(source, starts),
            model=model,
            kv_dtype=kv_dtype,
            progress=reading.told,
        )


def _inputs(trace: str, model: Path | None = None, *files: Path | None) -> list[Path]:
    """Every file the command reads."""
    from sim.curves.sources import files_of

    read = [] if trace == "-" else files_of(Path(trace))
    if model is not None:
        read.append(model / "config.json" if model.is_dir() else model)
    return read + [file for file in files if file is not None]


def _check_outputs(outputs: OutputArguments, inputs: list[Path]) -> None:
    """Refuse what cannot be written before a long trace is read, or half of it written."""
    from harness.charting import check_ending

    plots = outputs.plot or []
    for path in plots:
        check_ending(path)
    check_outputs([*plots, *([outputs.csv] if outputs.csv else ())], inputs)


def _give(content: dict[str, Any], draw: "Callable[[], Chart]", outputs: OutputArguments) -> None:
    """The files asked for, then the answer itself."""
    from harness.charting import save
    from harness.traces.tables import readable, write_csv

    chart = draw() if outputs.plot else {}  # first: what cannot be drawn leaves no file behind
    if outputs.csv:
        write_csv(content, outputs.csv)
    for path in outputs.plot or ():
        save(chart, path)
        console.say(f"wrote {path}")
    _show(content if outputs.as_json else readable(content), as_json=outputs.as_json)


def _show(content: dict[str, Any], *, as_json: bool) -> None:
    if as_json:
        console.show_json(content)
    else:
        show_trace(content)
