from dataclasses import dataclass
from typing import Annotated

import typer
from typer.testing import CliRunner

from harness.commands.arguments import spread_out


@dataclass(frozen=True, slots=True)
class Place:
    street: Annotated[str, typer.Argument()]
    number: Annotated[int, typer.Option()] = 7


def test_a_group_of_arguments_is_given_one_by_one_in_the_commands_order() -> None:
    got = []

    def send(place: Place, letter: str, *, times: int = 1) -> None:
        """Send a letter."""
        got.append((place, letter, times))

    app = typer.Typer()
    app.command()(spread_out(send))
    for words in (["Elm", "hello"], ["Elm", "hello", "--number", "9", "--times", "2"]):
        assert CliRunner().invoke(app, words).exit_code == 0
    assert got == [(Place("Elm", 7), "hello", 1), (Place("Elm", 9), "hello", 2)]
    assert CliRunner().invoke(app, ["Elm"]).exit_code == 2
