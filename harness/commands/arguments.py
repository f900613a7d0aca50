"""Arguments that several commands take, each declared once, and groups of arguments."""

from collections.abc import Callable
from dataclasses import MISSING, fields, is_dataclass
from functools import wraps
from inspect import Parameter, Signature, signature
from pathlib import Path
from typing import Annotated, Any, Final, get_type_hints

import typer

from harness.plan.presets import preset_names

Command = Callable[..., None]

RESULTS: Final = Path("results")

_PLAN_HELP = f"Preset ({', '.join(preset_names())}) or path of a plan.toml."
PlanName = Annotated[str, typer.Argument(help=_PLAN_HELP)]
PlanOrDemo = Annotated[
    str | None, typer.Argument(help=f"{_PLAN_HELP}  [default: demo]", show_default=False)
]
DummyWeights = Annotated[
    bool,
    typer.Option(
        "--dummy-weights", help="Weights made up by vLLM: no download, and outputs mean nothing."
    ),
]
RunPath = Annotated[Path, typer.Argument(help="Run folder, e.g. results/<UTC>-<plan id>.")]
Gate = Annotated[bool, typer.Option("--gate", help="Exit code 4 unless the verdict is supported.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON instead of text.")]


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
