"""How our plots look: colours, grids of panels with shared axes, legends that hide nothing. Knows Matplotlib alone.

No pyplot: a figure belongs to whoever made it, and no window is ever opened.
"""

import math
import textwrap
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

import matplotlib
import numpy as np
from matplotlib import colormaps, font_manager
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.cm import ScalarMappable
from matplotlib.colors import LinearSegmentedColormap, Normalize
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullFormatter

T = TypeVar("T")

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00", "#000000")  # Okabe and Ito, no yellow
GREY = "#777777"
DASHES = ("-", (0, (4, 1.5)), (0, (1, 1.2)), (0, (5, 1.5, 1, 1.5)))
WIDTH, DPI = 12.0, 150  # inches; a page of 1200 pixels shows them at their size
ACROSS = 4  # panels in one line
STEPS = LinearSegmentedColormap.from_list("steps", colormaps["viridis_r"](np.linspace(0.1, 1, 64)))  # late is dark
_FONT = "DejaVu Sans"
_STYLE: Any = {
    **{"font.family": _FONT, "font.size": 9.5, "axes.titlesize": 10.5, "axes.labelsize": 10, "legend.fontsize": 9},
    **{"xtick.labelsize": 9, "ytick.labelsize": 9, "text.usetex": False, "axes.formatter.useoffset": False},
    **{"axes.spines.top": False, "axes.spines.right": False, "axes.grid": True, "grid.color": "#dddddd"},
    **{"grid.linewidth": 0.6, "axes.axisbelow": True, "lines.linewidth": 1.5, "legend.frameon": False},
    **{"axes.edgecolor": "#666666", "xtick.color": "#333333", "ytick.color": "#333333", "figure.facecolor": "white"},
}


@contextmanager
def style() -> Iterator[None]:
    """Figures that are made and saved inside look as ours, whatever the user's own settings are."""
    with matplotlib.rc_context(_STYLE):
        yield


def line(index: int) -> dict[str, Any]:
    """Colour and dashes of the line number `index`: the colours first, then the dashes change."""
    return {"color": COLOURS[index % len(COLOURS)], "linestyle": DASHES[index // len(COLOURS) % len(DASHES)]}


@cache
def _drawable() -> frozenset[int]:
    return frozenset(font_manager.get_font(font_manager.findfont(_FONT)).get_charmap())


def plain(text: str) -> str:
    """`text` as Matplotlib can draw it: no mathematics between dollars, `?` for what the font lacks."""
    drawn = "".join(sign if sign.isprintable() and ord(sign) in _drawable() else "?" for sign in text)
    return drawn.replace("$", r"\$")


def shortened(text: str, most: int) -> str:
    """`text` without its middle if it has more than `most` characters: names tend to differ at their ends."""
    return text if len(text) <= most else f"{text[: most // 3]}…{text[len(text) - (most - most // 3 - 1) :]}"


def heading(text: str, width: int) -> str:
    """A title whose lines are cut into pieces of `width` characters, about three of each at most."""
    lines = [shortened(line, 3 * width) for line in text.split("\n")]
    return "\n".join(plain(part) for line in lines for part in textwrap.wrap(line, width, break_on_hyphens=False))


def grid(
    titles: Sequence[str], rows: int = 1, height: float = 3.0, margin: float = 0.0, shared: bool = True
) -> tuple[Figure, np.ndarray]:
    """A figure, and its panels [title, row]: a column for each title, `ACROSS` of them side by side.

    The panels of one row share the y axis, in all columns, if `shared`; those of one column the x axis. `margin`:
    inches that a legend or a colour bar needs on the right.
    """
    across = min(len(titles), ACROSS)
    blocks = math.ceil(len(titles) / across)
    width = min(WIDTH, 6.5 * across + margin)
    figure = Figure(figsize=(width, 0.5 + height * rows * blocks), layout="constrained", dpi=DPI)
    FigureCanvasAgg(figure)
    places = figure.add_gridspec(rows * blocks, across)
    panels = np.empty((len(titles), rows), object)
    letters = int((width - margin) / across * 10.5)
    for index, title in enumerate(titles):
        block, column = divmod(index, across)
        for row in range(rows):
            above, left = panels[index, 0] if row else None, panels[0, row] if shared else None
            panel = figure.add_subplot(places[block * rows + row, column], sharex=above, sharey=left)
            panel.tick_params(labelbottom=row == rows - 1, labelleft=column == 0 or not shared, length=3)
            panels[index, row] = panel
        panels[index, 0].set_title(heading(title, letters))
    return figure, panels


def name_axes(panels: np.ndarray, x: str, y: Sequence[str]) -> None:
    """Labels at the outer panels of a grid: `x` below each column, `y` of each row left of it."""
    for index, column in enumerate(panels):
        column[-1].set_xlabel(x)
        if index % ACROSS == 0:
            for panel, label in zip(column, y, strict=True):
                panel.set_ylabel(label)


def scale_y(panels: Iterable[Axes], may_be_log: bool = True) -> None:
    """Fits a y axis that `panels` share to their lines: logarithmic beyond a factor of 10, and flat lines look flat."""
    panels = list(panels)
    lines = [np.asarray(line.get_ydata(), float) for panel in panels for line in panel.lines]
    seen = np.concatenate([*lines, []])
    positive = seen[np.isfinite(seen) & (seen > 0)]
    if not len(positive):
        return
    low, high = positive.min(), positive.max()
    decades = math.log10(high / low) if may_be_log else 0
    if decades > 1:
        panels[0].set_yscale("log")
        panels[0].set_ylim(low / 10 ** (0.05 * decades), high * 10 ** (0.08 * decades))
    elif high / low < 1.02 and len(positive) == np.isfinite(seen).sum():
        panels[0].set_ylim(low * 0.99, high * 1.01)
    if 1 < decades < 3:
        for panel in panels:
            panel.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5) if decades < 2 else (1, 3)))
            panel.yaxis.set_major_formatter(FuncFormatter(lambda value, _: _short(value)))
            panel.yaxis.set_minor_formatter(NullFormatter())


def _short(value: float) -> str:
    digit, power = f"{value:.0e}".split("e")
    return f"{value:g}" if value >= 1e-4 else rf"${digit} \times 10^{{{int(power)}}}$"


def few_decades(panel: Axes) -> None:
    """A logarithmic x axis with 1, 2 and 5 of each decade, written out where that is short."""
    panel.set_xscale("log")
    panel.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    panel.xaxis.set_major_formatter("{x:g}")
    panel.xaxis.set_minor_formatter(NullFormatter())


def depth_axis(panel: Axes) -> None:
    """Whole numbers, from the first place to the last."""
    places = np.concatenate([*(np.asarray(line.get_xdata()) for line in panel.lines), []])
    if len(places):
        panel.set_xlim(places.min() - 0.7, places.max() + 0.7)
    panel.xaxis.set_major_locator(MaxNLocator(8, integer=True, steps=[1, 2, 4, 5, 10]))


def step_axis(panel: Axes) -> None:
    """A few round numbers, thousands as k."""
    panel.xaxis.set_major_locator(MaxNLocator(5, integer=True, steps=[1, 2, 2.5, 5, 10]))
    panel.xaxis.set_major_formatter(
        FuncFormatter(lambda value, _: f"{value / 1000:g}k" if value >= 1000 else f"{value:g}")
    )


def trace(panel: Axes, x: np.ndarray, y: np.ndarray, style: dict[str, Any]) -> None:
    """A line, with its points where they are few."""
    panel.plot(x, y, **style | ({"marker": "o", "markersize": 3} if len(x) <= 20 else {}))


def some_of(items: Sequence[T], most: int) -> list[T]:
    """Up to `most` of them, evenly spread, with the first and the last."""
    places = np.unique(np.linspace(0, len(items) - 1, min(most, len(items))).round().astype(int))
    return [items[place] for place in places]


def band(panel: Axes, x: np.ndarray, mean: np.ndarray, std: np.ndarray, color: Any) -> None:
    """One standard deviation around the mean; its upper edge is a line, so that the y axis has room for it."""
    if len(std) == len(mean):
        panel.fill_between(x, mean - std, mean + std, color=color, alpha=0.18, linewidth=0)
        panel.plot(x, mean + std, color=color, alpha=0.4, linewidth=0.5)


def step_colours(figure: Figure, panels: np.ndarray, steps: Sequence[float]) -> Callable[[float], Any]:
    """Colours by step, with their bar on the right unless there is one step alone."""
    colours = ScalarMappable(Normalize(min(steps), max(steps)), STEPS)
    if min(steps) < max(steps):
        bar = figure.colorbar(colours, ax=panels.ravel().tolist(), label="step", fraction=0.03, pad=0.015, aspect=30)
        bar.ax.yaxis.set_major_locator(MaxNLocator(5, integer=True))
        bar.ax.yaxis.set_major_formatter(FuncFormatter(lambda step, _: f"{step:,.0f}"))
    return lambda step: colours.to_rgba(np.array(step))


def legend(figure: Figure, looks: dict[str, dict[str, Any]], below: bool = False) -> None:
    """Names the lines outside of the panels: on the right, or side by side below them, where it adds to the height."""
    lines = [Line2D([], [], **look) for look in looks.values()]
    names = [plain(shortened(name, 60)) for name in looks]
    fitting = int(figure.get_figwidth() * 10.5 / (max(map(len, names)) + 8))
    columns = max(1, min(len(names), fitting)) if below else 1
    if below:
        figure.set_figheight(figure.get_figheight() + 0.22 * math.ceil(len(names) / columns))
    where = "outside lower center" if below else "outside right center"
    figure.legend(lines, names, loc=where, ncols=columns, handlelength=2.4)


def save(figure: Figure, path: Path) -> bytes:
    """Writes a PNG and returns it."""
    figure.savefig(path, dpi=DPI, metadata={"Software": None})
    return path.read_bytes()
