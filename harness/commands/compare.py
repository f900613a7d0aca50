"""``kvcliff compare``: what changed between runs."""

from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, get_args

import typer

from harness import console
from harness.commands.arguments import AsJson
from harness.commands.derived import refresh
from harness.errors import InputError

if TYPE_CHECKING:
    from harness.report.compare import Factor


def compare(
    runs: Annotated[
        list[Path], typer.Argument(help="Two or more run folders, the first is the base.")
    ],
    across: Annotated[
        str | None,
        typer.Option(
            metavar="engines|machine|host-size|gpu-size",
            help="The one thing in which the runs may differ.",
        ),
    ] = None,
    fail_on: Annotated[
        str | None,
        typer.Option(
            metavar="worse:FACTOR",
            help="Exit code 1 when any arm has changed and is so many times slower or more.",
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Say what changed between runs.

    Runs that must not be compared are refused.
    """
    from harness.report.compare import compare as compare_runs
    from harness.report.tables import show_comparison

    limit, factor = None if fail_on is None else _factor(fail_on), _named(across)
    for run in runs:
        refresh(run)
    comparison = compare_runs(runs, across=factor)
    if as_json:
        console.show_json(comparison.as_json())
    else:
        show_comparison(comparison)
    if limit is not None and comparison.is_worse(limit):
        raise typer.Exit(1)


def _factor(text: str) -> float:
    word, _, number = text.partition(":")
    with suppress(ValueError):
        if word == "worse" and 1 <= float(number) <= 1_000:
            return float(number)
    raise InputError(f"--fail-on {text!r}: accepted are worse:1 to worse:1000, as worse:1.05")


def _named(text: str | None) -> "Factor | None":
    from harness.report.compare import Factor

    for factor in get_args(Factor):
        if factor == text:
            return factor  # type: ignore[no-any-return]
    if text is None:
        return None
    raise InputError(f"--across {text!r}: accepted are {', '.join(get_args(Factor))}")
