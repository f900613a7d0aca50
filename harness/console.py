"""Everything the harness shows a person: progress and findings on stderr, results on stdout."""

import json
import sys
from typing import Any

from rich import box
from rich.console import Console
from rich.prompt import Confirm
from rich.table import Table

from harness.errors import KvcliffError
from harness.files import dump_json

# In a file or a pipe the tables need no folding to the width of a terminal that is not there.
out = Console(highlight=False, width=None if sys.stdout and sys.stdout.isatty() else 110)
err = Console(stderr=True, highlight=False)


def show_error(error: KvcliffError) -> None:
    """What happened and what to do, on stderr."""
    err.print(_printable(f"kvcliff: {error}"), style="bold red", markup=False, soft_wrap=True)
    if error.hint:
        err.print(f"  → {error.hint}", markup=False, soft_wrap=True)


def say(text: str) -> None:
    """One line of progress or advice, on stderr."""
    err.print(_printable(text), markup=False, soft_wrap=True)


def _printable(text: str) -> str:
    """``text`` without the control characters a server's message may hold."""
    return "".join(c if c == "\n" or c.isprintable() else "?" for c in text)


def show_json(content: Any) -> None:
    """A result for a program, on stdout."""
    print(json.dumps(content, indent=2))


def show_line(record: dict[str, Any]) -> None:
    """One JSON line of a result that is streamed, on stdout."""
    sys.stdout.write(dump_json(record) + "\n")


def show_text(text: str) -> None:
    """A paragraph of a result, on stdout."""
    out.print(text, markup=False)


def table_of(title: str, *columns: str) -> Table:
    """Columns of names aligned left, numbers right."""
    table = Table(
        title=title,
        title_justify="left",
        title_style="bold",
        box=box.SIMPLE_HEAD,
        padding=(0, 2, 0, 0),
        pad_edge=False,
        min_width=len(title),
    )
    for column in columns:
        is_name = column in ("pass", "arm", "source", "tier")
        table.add_column(column, justify="left" if is_name else "right")
    return table


def ask(question: str) -> bool:
    """Ask on the terminal; anything but yes is no."""
    return Confirm.ask(question, console=err, default=False)
