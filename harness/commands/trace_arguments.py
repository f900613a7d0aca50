"""Arguments that several trace commands take, in groups, and what the commands do with them."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from harness import console
from harness.commands.arguments import AsJson

if TYPE_CHECKING:
    from collections.abc import Callable

    from harness.charting import Chart
    from harness.traces.load import Loaded, TraceOptions

LastToken = Annotated[
    bool,
    typer.Option("--last-token", help="A fully cached prompt recomputes its last block, as vLLM."),
]
CAPACITIES: Final = "capacities: 100 (blocks), 2M tokens, 40 GiB, LOW..HIGH:N, commas"
ChunkTokens = Annotated[
    int | None,
    typer.Option(
        help="Tokens of a host chunk; LMCache's own are 256.  [default: the trace's block]",
        show_default=False,
        min=1,
    ),
]
WarmUp = Annotated[float, typer.Option(help="Share of the requests that only warm the caches.")]


@dataclass(frozen=True, slots=True)
class TraceArguments:
    """The trace and its blocks."""

    trace: Annotated[
        str, typer.Argument(help="Trace file, folder or archive, compiled or not; - reads stdin.")
    ]
    block_tokens: Annotated[
        int | None, typer.Option(help="Tokens of a block, where the rows do not say it.", min=1)
    ] = None
    deltas: Annotated[
        bool | None,
        typer.Option(
            "--deltas/--no-deltas",
            help="Mooncake rows of a session hold what each turn adds, or whole prompts.",
        ),
    ] = None


@dataclass(frozen=True, slots=True)
class StartArguments:
    """When a trace's sessions start."""

    spread_hours: Annotated[
        float | None,
        typer.Option(
            help="Start sessions without start times over so many hours.", show_default="24"
        ),
    ] = None
    seed: Annotated[int | None, typer.Option(help="Seed of those starts.", show_default="0")] = None
    time_scale: Annotated[
        float, typer.Option(help="Stretch the sessions' starts by this factor.")
    ] = 1.0


@dataclass(frozen=True, slots=True)
class ModelArguments:
    """Whose KV it is."""

    model: Annotated[
        str | None,
        typer.Option(help="Model folder, config.json or name on Hugging Face: gives GiB."),
    ] = None
    kv_dtype: Annotated[
        str, typer.Option(help="What the KV cache is kept in, e.g. bfloat16, fp8.")
    ] = "auto"


@dataclass(frozen=True, slots=True)
class OutputArguments:
    """Where points and plots go."""

    plot: Annotated[
        list[Path] | None,
        typer.Option(help="Write a plot: .png, .svg, .html or .json."),
    ] = None
    csv: Annotated[Path | None, typer.Option("--csv", help="Write the points as CSV.")] = None
    as_json: AsJson = False


def trace_options(source: TraceArguments, starts: StartArguments | None = None) -> "TraceOptions":
    """How the trace is taken; without ``starts``, as their defaults say."""
    from harness.traces.load import TraceOptions

    starts = starts or StartArguments()
    return TraceOptions(
        block_tokens=source.block_tokens,
        deltas=source.deltas,
        spread_hours=starts.spread_hours,
        seed=starts.seed,
        time_scale=starts.time_scale,
    )


def model_config(name: str | None) -> Path | None:
    """Where the model's config.json is; None without a model."""
    from harness.plan.lookup import config_of
    from harness.traces.load import input_errors

    if name is None:
        return None
    with input_errors():
        return config_of(name)


def load_trace(
    source: TraceArguments,
    starts: StartArguments | None = None,
    model: Path | None = None,
    kv_dtype: str = "auto",
) -> "Loaded":
    """The trace, with a bar that says how far it has been read."""
    from harness.traces.load import load
    from harness.traces.tables import read_progress

    options = trace_options(source, starts)
    with read_progress() as progress:
        return load(source.trace, options, model=model, kv_dtype=kv_dtype, progress=progress)


def inputs_of(trace: str, model: Path | None = None, *files: Path | None) -> list[Path]:
    """Every file the command reads."""
    from sim.curves.sources import files_of

    read = [] if trace == "-" else files_of(Path(trace))
    if model is not None:
        read.append(model / "config.json" if model.is_dir() else model)
    return read + [file for file in files if file is not None]


def check_output_files(outputs: OutputArguments, inputs: list[Path]) -> None:
    """Refuse what cannot be written before a long trace is read, or half of it written."""
    from harness.charting import check_ending
    from harness.files import check_outputs

    plots = outputs.plot or []
    for path in plots:
        check_ending(path)
    check_outputs([*plots, *([outputs.csv] if outputs.csv else ())], inputs)


def write_and_show(
    content: dict[str, Any], draw: "Callable[[], Chart]", outputs: OutputArguments
) -> None:
    """The files asked for, then the answer itself."""
    from harness.charting import save
    from harness.traces.tables import readable, write_csv

    chart = draw() if outputs.plot else {}  # first: what cannot be drawn leaves no file behind
    if outputs.csv:
        write_csv(content, outputs.csv)
    for path in outputs.plot or ():
        save(chart, path)
        console.say(f"wrote {path}")
    show_answer(content if outputs.as_json else readable(content), as_json=outputs.as_json)


def show_answer(content: dict[str, Any], *, as_json: bool) -> None:
    """A trace command's answer, on stdout."""
    from harness.traces.tables import show_trace

    if as_json:
        console.show_json(content)
    else:
        show_trace(content)
