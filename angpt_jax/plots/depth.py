"""Figures by depth: x is the layer or the sublayer."""

from collections.abc import Callable, Sequence

import numpy as np
from matplotlib.figure import Figure

from angpt_jax.metrics import Record
from angpt_jax.plots import look
from angpt_jax.plots.history import History, values

Profile = tuple[np.ndarray, np.ndarray, np.ndarray]  # places along the depth; mean and standard deviation at each


def by_layer(record: Record, kind: str, name: str) -> Profile:
    """The values of layer 1, 2, …"""
    mean, std = values(record, kind, name, "mean"), values(record, kind, name, "std")
    return np.arange(1, len(mean) + 1), mean, std


def by_sublayer(record: Record) -> Profile:
    """Norm of what attention 1, MLP 1, attention 2, … and the head read, at 1, 2, …"""

    def along(part: str) -> np.ndarray:
        streams = [values(record, "norms", f"{name}_stream", part) for name in ("attention", "mlp")]
        pairs = zip(*streams, strict=False)
        return np.array([*(value for pair in pairs for value in pair), *values(record, "norms", "final_stream", part)])

    mean, std = along("mean"), along("std")
    return np.arange(1, len(mean) + 1), mean, std


def gradient_by_layer(record: Record) -> Profile:
    """Embedding at 0, the layers, the head behind the last, with gaps between; it has no spread."""
    embedding, layers, head = (values(record, "gradient_norm", name) for name in ("embedding", "layers", "head"))
    depth, gap = len(layers), [np.nan]
    mean = np.concatenate([embedding[:1], gap, layers, gap, head[:1]])
    places = [*([0] * len(embedding[:1])), 1, *range(1, depth + 1), depth, *([depth + 1] * len(head[:1]))]
    return np.array(places), mean, np.array([])


def over_steps(
    runs: list[History],
    rows: dict[str, Callable[[Record], Profile]],
    x: str,
    lines: int,
    shared: bool = True,
    may_be_log: bool = True,
) -> Figure:
    """A column for each run, a row for each profile, a line for each of up to `lines` steps."""
    figure, panels = look.grid([run.name for run in runs], len(rows), margin=1.0, shared=shared)
    color_of = look.step_colours(figure, panels, [record["step"] for run in runs for record in run.instruments])
    for run, column in zip(runs, panels, strict=True):
        for profile, panel in zip(rows.values(), column, strict=True):
            seen = [(record["step"], *profile(record)) for record in run.instruments]
            seen = [line for line in seen if np.isfinite(line[2]).any()]
            for step, places, mean, _ in look.some_of(seen, lines)[:-1]:
                panel.plot(places, mean, color=color_of(step), linewidth=1.2, marker=".", markersize=3)
            for step, places, mean, std in seen[-1:]:
                panel.plot(places, mean, color=color_of(step), linewidth=2, marker="o", markersize=3)
                look.band(panel, places, mean, std, color_of(step))
            look.depth_axis(panel)
    for together in panels.T if shared else panels.reshape(-1, 1):
        look.scale_y(together, may_be_log)
    look.name_axes(panels, x, list(rows))
    return figure


def last_step(runs: list[History], rows: dict[str, Sequence[str]]) -> Figure:
    """A column for each run, a row for each group of norms; all at the last step that has any."""
    last = [run.seen("norms")[-1] for run in runs]
    titles = [f"{run.name}\nstep {record['step']:,}" for run, record in zip(runs, last, strict=True)]
    figure, panels = look.grid(titles, len(rows), margin=1.6)
    names = [name for row in rows.values() for name in row]
    looks = {name: look.line(index) | {"marker": "o", "markersize": 3} for index, name in enumerate(names)}
    for record, column in zip(last, panels, strict=True):
        for row, panel in zip(rows.values(), column, strict=True):
            for name in row:
                places, mean, std = by_layer(record, "norms", name)
                panel.plot(places, mean, **looks[name])
                look.band(panel, places, mean, std, looks[name]["color"])
            look.depth_axis(panel)
    for row in panels.T:
        look.scale_y(row)
    look.name_axes(panels, "layer", list(rows))
    look.legend(figure, {name.replace("_", " ").replace("mlp", "MLP"): style for name, style in looks.items()})
    return figure
