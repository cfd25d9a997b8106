"""Figures against tokens, time and steps."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from angpt_jax.plots import look
from angpt_jax.plots.history import History, values

PATHS = 12  # parameters in one row of panels, at most
TRAINING: dict[str, Any] = {"alpha": 0.4, "linewidth": 1.0}
VALIDATION: dict[str, Any] = {"marker": "o", "markersize": 4}


def losses(runs: list[History]) -> Figure:
    """Against tokens and against time, all runs in both panels."""
    figure, panels = look.grid(["loss against tokens", "loss against training time"], height=4.2)
    by_tokens, by_time = panels[:, 0]
    last = [run.metrics[-1] for run in runs]
    tokens, token_unit = unit([record["tokens"] for record in last], billions=1e9, millions=1e6, thousands=1e3)
    ends = [run.seconds_at(np.array([record["step"]]))[0] for run, record in zip(runs, last, strict=True)]
    seconds, time_unit = unit(ends, hours=3600, minutes=60)
    looks = {run.name: look.line(run.place) for run in runs}
    for run in runs:
        for name, style in ("loss", TRAINING), ("val_loss", VALIDATION):
            steps, loss = run.curve(name)
            drawn = looks[run.name] | style | ({"markevery": max(1, len(steps) // 25)} if "marker" in style else {})
            by_tokens.plot(run.tokens_at(steps) / tokens, loss, **drawn)
            by_time.plot(run.seconds_at(steps) / seconds, loss, **drawn)
    _leave_out_the_start(by_tokens, runs)
    by_tokens.set(xlabel=f"tokens ({token_unit})" if token_unit else "tokens", ylabel="loss (nats per token)")
    by_time.set_xlabel(f"training time ({time_unit or 'seconds'})")
    looks |= {"training loss": TRAINING | {"color": look.GREY}, "validation loss": VALIDATION | {"color": look.GREY}}
    look.legend(figure, looks, below=True)
    return figure


def unit(ends: Sequence[float], **units: float) -> tuple[float, str]:
    """Size and name of the first unit that the largest end reaches; 1 and no name if it reaches none."""
    return next(((size, unit) for unit, size in units.items() if max(ends) >= size), (1, ""))


def _leave_out_the_start(panel: Axes, runs: list[History]) -> None:
    """Fits the y axis to what comes after the first tenth of each run."""
    curves = [(run, *run.curve(name)) for run in runs for name in ("loss", "val_loss")]
    seen = np.concatenate([loss[steps >= run.metrics[-1]["step"] / 10] for run, steps, loss in curves])
    if len(seen) and seen.max() > seen.min():
        room = 0.05 * (seen.max() - seen.min())
        panel.set_ylim(seen.min() - room, seen.max() + room)


@dataclass(frozen=True)
class Row:
    """Panels that follow parameters over the steps.

    Args:
        label: of the y axis
        kind: what instruments measured of each parameter
        of: which parameters
        percent: whether the values are shares
    """

    label: str
    kind: str
    of: Literal["all", "matrices", "others"] = "all"
    percent: bool = False

    def paths(self, runs: list[History]) -> list[str]:
        """The parameters that any of the runs has: those of attention, of the MLP, others."""
        matrices, found = _names(runs, "update_ratio"), _names(runs, self.kind)
        chosen = [path for path in found if self.of == "all" or (path in matrices) == (self.of == "matrices")]
        groups = ("layers/attention", "layers/mlp")
        return sorted(chosen, key=lambda path: next((i for i, group in enumerate(groups) if path.startswith(group)), 2))

    def line(self, run: History, path: str) -> tuple[np.ndarray, np.ndarray]:
        """Steps, and the mean over layers at each."""
        points = [(record["step"], values(record, self.kind, path)) for record in run.instruments]
        means = [(step, value[np.isfinite(value)].mean()) for step, value in points if np.isfinite(value).any()]
        steps, mean = np.array(means, float).reshape(-1, 2).T
        return steps, mean * (100 if self.percent else 1)


def _names(runs: list[History], kind: str) -> list[str]:
    return list(dict.fromkeys(path for run in runs for record in run.instruments for path in record.get(kind) or ()))


def by_parameter(runs: list[History], rows: Sequence[Row]) -> Figure:
    """A column for each run, a line for each parameter."""
    paths = {row: found for row in rows if (found := row.paths(runs))}
    shown = dict.fromkeys(path for found in paths.values() for path in found[:PATHS])
    looks = {path: look.line(index) for index, path in enumerate(shown)}
    figure, panels = look.grid([run.name for run in runs], len(paths), margin=2.5)
    for run, column in zip(runs, panels, strict=True):
        for (row, found), panel in zip(paths.items(), column, strict=True):
            for path in found[:PATHS]:
                look.trace(panel, *row.line(run, path), looks[path])
            look.step_axis(panel)
    for row, line in zip(paths, panels.T, strict=True):
        if row.percent:
            line[0].set_ylim(-3, 103)
        else:
            look.scale_y(line)
    look.name_axes(panels, "step", [row.label for row in paths])
    left_out = sum(len(found[PATHS:]) for found in paths.values())
    more = {f"and {left_out} more": {"linestyle": "none"}} if left_out else {}
    look.legend(figure, {path.removeprefix("layers/"): style for path, style in looks.items()} | more)
    return figure


def logit_scales(runs: list[History]) -> Figure:
    """The scale of the logits over the steps, all runs in one panel."""
    figure, panels = look.grid(["scale of the logits"], height=3.6, margin=1.0)
    panel = panels[0, 0]
    looks = {run.name: look.line(run.place) for run in runs}
    for run in runs:
        seen = [
            (r["step"], *(values(r, "logit_scale", "head", part) for part in ("mean", "std"))) for r in run.instruments
        ]
        points = [(step, mean[0], std[0] if len(std) else np.nan) for step, mean, std in seen if len(mean)]
        steps, mean, std = np.array(points, float).reshape(-1, 3).T
        look.trace(panel, steps, mean, looks[run.name])
        look.band(panel, steps, mean, std, looks[run.name]["color"])
    look.step_axis(panel)
    look.name_axes(panels, "step", [r"$s_Z$ (mean over the vocabulary)"])
    look.legend(figure, looks, below=True)
    return figure
