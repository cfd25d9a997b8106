"""Tables on a terminal."""

from collections.abc import Sequence

WIDEST = 10_000  # characters; a terminal breaks lines, but nothing is cut off


def print_table(heads: Sequence[str], rows: Sequence[Sequence[str]], left: Sequence[str] = ()) -> None:
    """A table as wide as it needs to be; nothing without rows. Text stands left in the first column and in those of
    `left`."""
    if not rows:
        return
    from rich import box  # not before: it takes a tenth of a second to load
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=box.SIMPLE_HEAD)
    for number, head in enumerate(heads):
        table.add_column(head, justify="right" if number and head not in left else "left", no_wrap=True)
    for row in rows:
        table.add_row(*map(Text, row))
    Console(highlight=False, width=WIDEST).print(table)
