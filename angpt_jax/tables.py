"""Tables for people, on a terminal or in a log."""

from collections.abc import Sequence

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

UNKNOWN = "–"
WIDEST = 10_000


def print_table(heads: Sequence[str], rows: Sequence[Sequence[str]], words: Sequence[str] = ()) -> None:
    """A table as wide as it needs to be; nothing without rows. The first column and those in `words` are text, which
    stands at the left; the others are numbers."""
    if not rows:
        return
    table = Table(box=box.SIMPLE_HEAD)
    for number, head in enumerate(heads):
        table.add_column(Text(head), justify="right" if number and head not in words else "left", no_wrap=True)
    for row in rows:
        table.add_row(*map(Text, row))
    console = Console(highlight=False)
    needed = console.measure(table, options=console.options.update(width=WIDEST)).maximum
    console.width = max(console.width, needed)
    console.print(table, crop=False)
