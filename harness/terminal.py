"""The two streams of a terminal as rich draws on them: tables, bars, colours."""

import sys

from rich import box
from rich.console import Console
from rich.table import Table

# Text is shown as it is: a message may hold [brackets] and :colons:, which rich would read as marks.
# In a file or a pipe the tables need no folding to the width of a terminal that is not there.
out = Console(
    highlight=False,
    markup=False,
    emoji=False,
    width=None if sys.stdout and sys.stdout.isatty() else 110,
)
err = Console(stderr=True, highlight=False, markup=False, emoji=False)


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
