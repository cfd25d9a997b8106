"""Tables on the terminal."""

from collections.abc import Collection, Sequence

WIDEST = 1000  # characters of a line


def print_table(heads: Sequence[str], rows: Sequence[Sequence[str]], texts: Collection[str] = ()) -> None:
    """A table as wide as it needs to be; nothing without rows. The first column and `texts` are on the left."""
    if not rows:
        return
    from rich import box  # not before: rich takes a while to load
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=box.SIMPLE_HEAD)
    for number, head in enumerate(heads):
        table.add_column(head, justify="right" if number and head not in texts else "left", no_wrap=True)
    for row in rows:
        table.add_row(*map(Text, row))
    console = Console(highlight=False)
    needed = console.measure(table, options=console.options.update(width=WIDEST)).maximum
    console.print(table, width=max(console.width, needed), crop=False)
