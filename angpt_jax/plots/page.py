"""A web page in one file: a table, and pictures that it carries inside."""

import base64
from collections.abc import Iterable, Sequence
from html import escape
from typing import NamedTuple

_STYLE = """\
body { font: 16px/1.5 system-ui, sans-serif; color: #222; background: #fff; max-width: 1160px; margin: 24px auto 64px;
  padding: 0 16px; }
h1 { font-size: 26px; margin: 0 0 16px; overflow-wrap: anywhere; }
h2 { font-size: 19px; margin: 48px 0 4px; }
p { margin: 4px 0 12px; max-width: 900px; }
table { border-collapse: collapse; font-size: 15px; }
th, td { padding: 6px 14px 6px 0; text-align: right; vertical-align: top; border-bottom: 1px solid #ddd; }
th { font-weight: 600; max-width: 140px; vertical-align: bottom; border-bottom-color: #888; }
th:nth-child(-n+2), td:nth-child(-n+2) { text-align: left; }
td:first-child { overflow-wrap: anywhere; min-width: 180px; }
td { font-variant-numeric: tabular-nums; }
small { color: #666; }
img { max-width: 100%; height: auto; display: block; }
.colour { display: inline-block; width: 12px; height: 12px; margin-right: 8px; border-radius: 2px; }
.note { background: #f4f4f4; padding: 10px 14px; }
nav { margin-top: 20px; }
nav a { margin-right: 16px; white-space: nowrap; }
"""


class Shown(NamedTuple):
    """A picture on the page: `name` is its anchor, `png` the file, `width` its width on the page in pixels."""

    name: str
    title: str
    caption: str
    png: bytes
    width: int


class Cell(NamedTuple):
    """Text of a table with a smaller line below it, and a patch of colour before it."""

    text: str
    below: str = ""
    colour: str = ""


def page(
    title: str, header: Sequence[str], rows: Iterable[Sequence[Cell]], notes: Iterable[str], pictures: Sequence[Shown]
) -> str:
    """The whole file; all text is escaped."""
    links = "\n".join(f'<a href="#{escape(shown.name)}">{escape(shown.title)}</a>' for shown in pictures)
    parts = [
        "<!doctype html>",
        f'<html lang="en">\n<head>\n<meta charset="utf-8">\n<title>{escape(title)}</title>',
        f"<style>\n{_STYLE}</style>\n</head>\n<body>\n<h1>{escape(title)}</h1>",
        f"<table>\n<tr>{''.join(f'<th>{escape(name)}</th>' for name in header)}</tr>",
        *(f"<tr>{''.join(map(_cell, row))}</tr>" for row in rows),
        "</table>",
        *(f'<p class="note">{escape(note)}</p>' for note in notes),
        f"<nav>\n{links}\n</nav>",
        *map(_picture, pictures),
        "</body>\n</html>\n",
    ]
    return "\n".join(parts)


def _cell(cell: Cell) -> str:
    colour = f'<span class="colour" style="background: {escape(cell.colour)}"></span>' if cell.colour else ""
    below = f"<br><small>{escape(cell.below)}</small>" if cell.below else ""
    return f"<td>{colour}{escape(cell.text)}{below}</td>"


def _picture(shown: Shown) -> str:
    data = base64.b64encode(shown.png).decode("ascii")
    title, caption = escape(shown.title), escape(shown.caption)
    image = f'<img src="data:image/png;base64,{data}" alt="{title}" width="{shown.width}">'
    return f'<h2 id="{escape(shown.name)}">{title}</h2>\n<p>{caption}</p>\n{image}'
