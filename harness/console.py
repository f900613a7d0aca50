"""Everything the harness says to a person or a program: advice on stderr, results on stdout.

What is drawn is in ``terminal``, which is imported when it is needed: a version has no colours.
"""

import json
import sys
from typing import Any

from harness.errors import KvcliffError
from harness.files import dump_json


def show_error(error: KvcliffError) -> None:
    """What happened and what to do, on stderr."""
    say(f"kvcliff: {error}", style="bold red")
    if error.hint:
        say(f"  → {error.hint}")


def say(text: str, *, style: str | None = None) -> None:
    """One line of progress or advice, on stderr, without control characters of a server's."""
    from harness.terminal import err

    shown = "".join(c if c == "\n" or c.isprintable() else "?" for c in text)
    err.print(shown, style=style, soft_wrap=True)


def show_json(content: Any) -> None:
    """A result for a program, on stdout."""
    print(json.dumps(content, indent=2))


def show_line(record: dict[str, Any]) -> None:
    """One JSON line of a result that is streamed, on stdout."""
    sys.stdout.write(dump_json(record) + "\n")


def show_text(text: str) -> None:
    """A line of a result, on stdout: a path or a version, as it is."""
    print(text)


def show_paragraph(text: str) -> None:
    """Sentences of a result, on stdout, in lines of the terminal's width."""
    from harness.terminal import out

    out.print(text)


def ask(question: str) -> bool:
    """Ask on the terminal; anything but yes is no."""
    from rich.prompt import Confirm

    from harness.terminal import err

    return Confirm.ask(question, console=err, default=False)
