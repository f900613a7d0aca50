from pathlib import Path

import pytest

from harness import console
from harness.machine.tables import show_checks


def test_brackets_and_colons_of_a_message_are_shown_as_they_are(
    capsys: pytest.CaptureFixture[str],
) -> None:
    console.say("see [arms.NAME] and a:book:b")
    check = {"what": "GPU", "status": "error", "found": ":x:", "remedy": "edit [arms.NAME]"}
    show_checks([check])
    captured = capsys.readouterr()
    assert captured.err == "see [arms.NAME] and a:book:b\n"
    assert ":x:" in captured.out
    assert "edit [arms.NAME]" in captured.out


def test_a_path_is_one_line_however_long_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    path = Path("/run folder", *["with a long name"] * 20)
    console.show_text(str(path))
    assert capsys.readouterr().out == f"{path}\n"


def test_control_characters_of_a_server_do_not_reach_the_terminal(
    capsys: pytest.CaptureFixture[str],
) -> None:
    console.say("log: \x1b[2Jgone")
    assert capsys.readouterr().err == "log: ?[2Jgone\n"
