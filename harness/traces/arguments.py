"""Arguments that several trace commands take, each declared once."""

from collections.abc import Callable
from dataclasses import MISSING, dataclass, fields, is_dataclass
from functools import wraps
from inspect import Parameter, Signature, signature
from pathlib import Path
from typing import Annotated, Any, get_type_hints

import typer

Command = Callable[..., None]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON instead of text.")]
LastToken = Annotated[
    bool,
    typer.Option("--last-token", help="A fully cached prompt recomputes its last block, as vLLM."),
]
WarmUp = Annotated[float, typer.Option(help="Share of the requests that only warm the caches.")]


@dataclass(frozen=True, slots=True)
class TraceArguments:
    """The trace and its blocks."""

    trace: Annotated[
        str, typer.Argument(help="Trace file, folder or archive, compiled or not; - reads stdin.")
    ]
    block_tokens: Annotated[
        int | None, typer.Option(help="Tokens of a block, for formats that do not say it.", min=1)
    ] = None
    full_blocks: Annotated[
        bool, typer.Option("--full-blocks", help="Leave out blocks a prompt does not fill.")
    ] = False


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
        str | None, typer.Option(help="Model folder, config.json or downloaded hub id: gives GiB.")
    ] = None
    kv_dtype: Annotated[
        str, typer.Option(help="What the KV cache is kept in, e.g. bfloat16, fp8.")
    ] = "auto"


@dataclass(frozen=True, slots=True)
class OutputArguments:
    """Where points and plots go."""

    plot: Annotated[
        list[Path] | None,
        typer.Option(
            "--plot", "--png", "--svg", "--html", help="Write a plot: .png, .svg, .html or .json."
        ),
    ] = None
    csv: Annotated[Path | None, typer.Option("--csv", help="Write the points as CSV.")] = None
    as_json: AsJson = False


def spread_out(command: Command) -> Command:
    """``command`` as Typer takes it: a parameter that is a group above becomes the group's own."""
    hints = get_type_hints(command, include_extras=True)
    groups: dict[str, Any] = {name: hint for name, hint in hints.items() if is_dataclass(hint)}
    parameters = []
    for name, parameter in signature(command).parameters.items():
        if name in groups:
            parameters += _parameters(groups[name])
        else:
            kind = Parameter.KEYWORD_ONLY
            parameters.append(parameter.replace(kind=kind, annotation=hints[name]))

    @wraps(command)
    def spread(**given: Any) -> None:
        whole = {
            name: group(**{field.name: given.pop(field.name) for field in fields(group)})
            for name, group in groups.items()
        }
        command(**whole, **given)

    spread.__signature__ = Signature(parameters)  # type: ignore[attr-defined]
    spread.__annotations__ = {p.name: p.annotation for p in parameters}
    return spread


def _parameters(group: Any) -> list[Parameter]:
    hints = get_type_hints(group, include_extras=True)
    return [
        Parameter(
            field.name,
            Parameter.KEYWORD_ONLY,
            default=Parameter.empty if field.default is MISSING else field.default,
            annotation=hints[field.name],
        )
        for field in fields(group)
    ]
