"""The trace commands: ``kvcliff compile``, ``curve``, ``surface``, ``convert``, ``describe``.

numpy, numba and the plots are imported inside the commands: no other command needs them.
"""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from harness import console
from harness.errors import InputError
from harness.files import refuse_evidence, refuse_missing_folder
from harness.traces.tables import ReadProgress, show_trace

if TYPE_CHECKING:
    from collections.abc import Callable

    from harness.charting import Chart
    from harness.traces.load import Loaded, TraceOptions

Trace = Annotated[
    str, typer.Argument(help="Trace file, folder or archive, compiled or not; - reads stdin.")
]
BlockTokens = Annotated[
    int | None, typer.Option(help="Tokens of a block, for formats that do not say it.", min=1)
]
FullBlocks = Annotated[
    bool, typer.Option("--full-blocks", help="Leave out blocks a prompt does not fill.")
]
SpreadHours = Annotated[
    float | None,
    typer.Option(help="Start sessions without start times over so many hours.", show_default="24"),
]
Seed = Annotated[int | None, typer.Option(help="Seed of those starts.", show_default="0")]
TimeScale = Annotated[float, typer.Option(help="Stretch the sessions' starts by this factor.")]
Model = Annotated[
    str | None, typer.Option(help="Model folder, config.json or downloaded hub id: gives GiB.")
]
KvDtype = Annotated[str, typer.Option(help="What the KV cache is kept in, e.g. bfloat16, fp8.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON instead of text.")]
LastToken = Annotated[
    bool,
    typer.Option("--last-token", help="A fully cached prompt recomputes its last block, as vLLM."),
]
WarmUp = Annotated[float, typer.Option(help="Share of the requests that only warm the caches.")]
Plots = Annotated[
    list[Path] | None,
    typer.Option(
        "--plot", "--png", "--svg", "--html", help="Write a plot: .png, .svg, .html or .json."
    ),
]
Csv = Annotated[Path | None, typer.Option("--csv", help="Write the points as CSV.")]


def add_to(app: typer.Typer) -> None:
    """Register the trace commands with the command line ``app``."""
    app.command(name="compile")(compile_command)
    for command in (curve, surface, convert, describe):
        app.command()(command)


def compile_command(
    trace: Trace,
    output: Annotated[Path, typer.Argument(help="Where to write it: NAME.kvtrace.npz.")],
    block_tokens: BlockTokens = None,
    full_blocks: FullBlocks = False,
    as_json: AsJson = False,
) -> None:
    """Compile a trace to a small file."""
    from harness.traces.compile import compile_trace

    _check_files(trace, [output])
    with ReadProgress() as reading:
        content = compile_trace(
            trace, output, _options(block_tokens, full_blocks), progress=reading.told
        )
    _show(content, as_json=as_json)


def describe(
    trace: Trace,
    block_tokens: BlockTokens = None,
    full_blocks: FullBlocks = False,
    as_json: AsJson = False,
) -> None:
    """Say what a trace holds."""
    from harness.traces.describe import describe_trace

    with ReadProgress() as reading:
        content = describe_trace(trace, _options(block_tokens, full_blocks), progress=reading.told)
    _show(content, as_json=as_json)


def convert(
    trace: Trace,
    output: Annotated[Path, typer.Argument(help="File to write.")],
    target: Annotated[str, typer.Option("--to", help="lmcache or mooncake.")] = "lmcache",
    chunk_tokens: Annotated[
        int | None, typer.Option(help="Tokens of a written chunk.", min=1)
    ] = None,
    block_tokens: BlockTokens = None,
    full_blocks: FullBlocks = False,
    model: Model = None,
    kv_dtype: KvDtype = "auto",
    as_json: AsJson = False,
) -> None:
    """Write a trace for another tool."""
    from harness.traces.convert import convert_trace

    _check_files(trace, [output])
    with ReadProgress() as reading:
        content = convert_trace(
            trace,
            output,
            target,
            _options(block_tokens, full_blocks),
            chunk_tokens=chunk_tokens,
            model=_model(model),
            kv_dtype=kv_dtype,
            progress=reading.told,
        )
    _show(content, as_json=as_json)


def curve(
    trace: Trace,
    at: Annotated[
        str | None,
        typer.Option(help="Capacities: 100 (blocks), 2M tokens, 40 GiB, LOW..HIGH:N, commas."),
    ] = None,
    target: Annotated[
        list[float] | None, typer.Option(help="Capacity for this share of the ideal hits.")
    ] = None,
    policy: Annotated[
        list[str] | None, typer.Option(help="Replay fifo, lru, mru, lfu, arc or belady too.")
    ] = None,
    bands: Annotated[
        bool, typer.Option("--bands", help="Bands where only bands are honest.")
    ] = False,
    concurrency: Annotated[
        Path | None, typer.Option(help="CSV of request,start_s,finish_s: overlapping requests.")
    ] = None,
    last_token: LastToken = False,
    decode: Annotated[
        bool, typer.Option("--decode", help="Generated tokens take blocks too.")
    ] = False,
    warm_up: WarmUp = 0.0,
    lmcache_order: Annotated[
        bool, typer.Option("--lmcache-order", help="Touch forward, as LMCache's simulator does.")
    ] = False,
    block_tokens: BlockTokens = None,
    full_blocks: FullBlocks = False,
    spread_hours: SpreadHours = None,
    seed: Seed = None,
    time_scale: TimeScale = 1.0,
    model: Model = None,
    kv_dtype: KvDtype = "auto",
    mark: Annotated[
        str | None, typer.Option(help="Your GPU's capacity, as for --at: marked in the plot.")
    ] = None,
    measured: Annotated[
        Path | None, typer.Option(help="CSV of gpu_blocks,hit_share: points to plot too.")
    ] = None,
    plot: Plots = None,
    csv: Csv = None,
    as_json: AsJson = False,
) -> None:
    """Hits at every GPU capacity, exactly."""
    from harness.traces.curve import read_measured, run_curve
    from harness.traces.plots import cliff
    from harness.traces.serving import Serving

    _check_outputs(trace, plot, csv)
    points = read_measured(measured) if measured else ()
    loaded = _load(
        trace, _options(block_tokens, full_blocks, spread_hours, seed, time_scale), model, kv_dtype
    )
    marked = None if mark is None else loaded.capacity(mark)
    run = run_curve(
        loaded,
        Serving(last_token=last_token, decode=decode, warm_up=warm_up, forward=lmcache_order),
        at=at,
        targets=target or (),
        policies=policy or (),
        with_bands=bands,
        concurrency=concurrency,
    )
    _give(
        run.json,
        lambda: cliff(run, mark_blocks=marked, measured=points),
        plot,
        csv,
        as_json=as_json,
    )


def surface(
    trace: Trace,
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
    block_tokens: BlockTokens = None,
    full_blocks: FullBlocks = False,
    spread_hours: SpreadHours = None,
    seed: Seed = None,
    time_scale: TimeScale = 1.0,
    model: Model = None,
    kv_dtype: KvDtype = "auto",
    plot: Plots = None,
    csv: Csv = None,
    as_json: AsJson = False,
) -> None:
    """Token sources at every GPU x host capacity."""
    from harness.traces.plots import surface_chart
    from harness.traces.serving import Serving
    from harness.traces.surface import run_surface

    _check_outputs(trace, plot, csv)
    loaded = _load(
        trace, _options(block_tokens, full_blocks, spread_hours, seed, time_scale), model, kv_dtype
    )
    run = run_surface(
        loaded,
        Serving(last_token=last_token, warm_up=warm_up),
        gpu=gpu,
        host=host,
        chunk_tokens=chunk_tokens,
    )
    _give(run.json, lambda: surface_chart(run), plot, csv, as_json=as_json)


def _options(
    block_tokens: int | None,
    full_blocks: bool,
    spread_hours: float | None = None,
    seed: int | None = None,
    time_scale: float = 1.0,
) -> "TraceOptions":
    from harness.traces.load import TraceOptions

    return TraceOptions(
        block_tokens=block_tokens,
        full_blocks=full_blocks,
        spread_hours=spread_hours,
        seed=seed,
        time_scale=time_scale,
    )


def _model(name: str | None) -> Path | None:
    from harness.traces.load import input_errors
    from sim.geometry import find_model

    if name is None:
        return None
    with input_errors():
        return find_model(name)


def _load(trace: str, options: "TraceOptions", model: str | None, kv_dtype: str) -> "Loaded":
    from harness.traces.load import load

    with ReadProgress() as reading:
        return load(trace, options, model=_model(model), kv_dtype=kv_dtype, progress=reading.told)


def _check_outputs(trace: str, plots: list[Path] | None, csv: Path | None) -> None:
    """Refuse what cannot be written before a long trace is read, or half of it written."""
    from harness.charting import check_ending

    for path in plots or ():
        check_ending(path)
    _check_files(trace, [*(plots or ()), *([csv] if csv else ())])


def _check_files(trace: str, outputs: list[Path]) -> None:
    """InputError unless ``outputs`` are files of their own that can be written."""
    for path in outputs:
        refuse_evidence(path)
        refuse_missing_folder(path)
        if trace != "-" and path.resolve() == Path(trace).resolve():
            raise InputError(f"{path} is the trace itself; give the name of another file")
    if len({path.resolve() for path in outputs}) < len(outputs):
        raise InputError(f"two outputs are one file: {', '.join(map(str, outputs))}")


def _give(
    content: dict[str, Any],
    draw: "Callable[[], Chart]",
    plots: list[Path] | None,
    csv: Path | None,
    *,
    as_json: bool,
) -> None:
    """The files asked for, then the answer itself."""
    from harness.charting import save
    from harness.traces.tables import readable, write_csv

    chart = draw() if plots else {}  # first: what cannot be drawn leaves no file behind
    if csv:
        write_csv(content, csv)
    for path in plots or ():
        save(chart, path)
        console.say(f"wrote {path}")
    _show(content if as_json else readable(content), as_json=as_json)


def _show(content: dict[str, Any], *, as_json: bool) -> None:
    if as_json:
        console.show_json(content)
    else:
        show_trace(content)
