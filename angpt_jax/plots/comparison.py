"""The pictures of a comparison, in their order."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from angpt_jax.plots import look
from angpt_jax.plots.curves import unit
from angpt_jax.plots.page import Shown
from angpt_jax.plots.pictures import PIXELS
from angpt_jax.speedup import tokens_to
from angpt_jax.tuning import WITHIN, Tuning
from angpt_jax.verdict import Verdict, curve

LOSSES = (
    "Mean over seeds; the band is from the lowest to the highest seed. The dashed line is the baseline's last loss, a "
    "dot is where a mean reaches it. Time is steps times the median step time. What lies above the frame belongs to "
    "the first quarter."
)
SPEEDUPS = (
    "Against the baseline, at equal loss: mean and interval over seeds, small dots are the seeds. Right of the line is "
    "faster."
)
SHOWN = 1.25  # a learning rate that loses the start would leave the others no height
TUNING = (
    f"Training loss over the last tenth of the steps of each tuning run; a ring is what was chosen, a band the range "
    f"within {WITHIN:.0%} of it. Runs that diverged are left out, lost ones lie above the frame."
)


def draw(verdicts: Sequence[Verdict], baseline: str, tunings: Mapping[str, Tuning], folder: Path) -> list[Shown]:
    """Writes each picture that there is something for, and removes those of an earlier one that have nothing."""
    ran = [one for one in verdicts if one.runs]
    faster = [one for one in verdicts if one.tokens.seeds]
    tried = {one.place: tunings[one.name] for one in verdicts if one.name in tunings and tunings[one.name].tolerance}
    names = {one.place: one.name for one in verdicts}
    pictures = (
        ("losses", "Validation loss", LOSSES, lambda: losses(ran, baseline), ran),
        ("speedups", "Speed-up at equal loss", SPEEDUPS, lambda: speedups(faster), faster),
        ("tuning", "Tuning", TUNING, lambda: scores({names[place]: (place, t) for place, t in tried.items()}), tried),
    )
    shown = []
    for name, title, caption, make, there in pictures:
        path = folder / f"{name}.png"
        path.unlink(missing_ok=True)
        if there:
            with look.style():
                figure = make()
                shown.append(
                    Shown(name, title, caption, look.save(figure, path), round(figure.get_figwidth() * PIXELS))
                )
    return shown


def losses(verdicts: Sequence[Verdict], baseline: str) -> Figure:
    """Against tokens and against time, all contenders in both panels."""
    figure, panels = look.grid(["loss against tokens", "loss against training time"], height=4.2)
    curves = {one.name: _mean_curve(one) for one in verdicts}
    ends = {name: tokens[-1] for name, (tokens, *_) in curves.items()}
    token_unit, token_name = unit([*ends.values()], billions=1e9, millions=1e6, thousands=1e3)
    per_token = {one.name: _seconds_per_token(one) for one in verdicts}
    time_unit, time_name = unit([ends[name] * per_token[name] for name in ends], hours=3600, minutes=60)
    goal = next((float(curves[one.name][1][-1]) for one in verdicts if one.name == baseline), None)
    for one in verdicts:
        tokens, mean, low, high = curves[one.name]
        for panel, scale in (panels[0, 0], 1 / token_unit), (panels[1, 0], per_token[one.name] / time_unit):
            panel.plot(tokens * scale, mean, **look.line(one.place))
            panel.fill_between(tokens * scale, low, high, color=look.line(one.place)["color"], alpha=0.18, linewidth=0)
            reached = None if goal is None else tokens_to(mean, tokens, goal)
            if reached is not None and goal is not None:
                panel.plot(reached * scale, goal, "o", color=look.line(one.place)["color"], markersize=6)
    for panel in panels[:, 0] if goal is not None else ():
        panel.axhline(goal, color=look.GREY, linestyle="--", linewidth=1)
    _fit(panels[0, 0], list(curves.values()))
    panels[0, 0].set(
        xlabel=f"tokens ({token_name})" if token_name else "tokens", ylabel="validation loss (nats per token)"
    )
    panels[1, 0].set_xlabel(f"training time ({time_name or 'seconds'})")
    look.legend(figure, {one.name: look.line(one.place) for one in verdicts}, below=True)
    return figure


def _mean_curve(one: Verdict) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Tokens of every evaluation of any seed; mean, lowest and highest loss over seeds there."""
    curves = [curve(run) for run in one.runs.values()]
    tokens = np.unique(np.concatenate([at for at, _ in curves]))
    loss = np.stack([np.interp(tokens, at, values) for at, values in curves])
    return tokens, loss.mean(0), loss.min(0), loss.max(0)


def _seconds_per_token(one: Verdict) -> float:
    """NaN, which draws nothing, where no step was timed."""
    last = next(iter(one.runs.values())).metrics[-1]
    return (np.nan if one.step_seconds is None else one.step_seconds) * last["step"] / last["tokens"]


def _fit(panel: Axes, curves: Sequence[tuple[np.ndarray, ...]]) -> None:
    """Fits the y axis to what comes after the first quarter."""
    seen = np.concatenate([np.concatenate([low, high])[np.tile(at >= at[-1] / 4, 2)] for at, _, low, high in curves])
    room = 0.05 * (seen.max() - seen.min()) or 0.01
    panel.set_ylim(seen.min() - room, seen.max() + room)


def speedups(verdicts: Sequence[Verdict]) -> Figure:
    """A panel for tokens, time and ended schedules, a line for each contender."""
    kinds = {"in tokens": "tokens", "in time": "time", "in steps of ended schedules": "ended"}
    kinds = {title: name for title, name in kinds.items() if any(getattr(one, name).seeds for one in verdicts)}
    figure, panels = look.grid(list(kinds), height=1.2 + 0.35 * len(verdicts), shared=False)
    for name, panel in zip(kinds.values(), panels[:, 0], strict=True):
        panel.axvline(1, color=look.GREY, linewidth=1)
        for row, one in enumerate(verdicts):
            estimate, colour = getattr(one, name), look.line(one.place)["color"]
            if estimate.mean is None:
                continue
            panel.plot(list(estimate.seeds.values()), [row + 0.22] * len(estimate.seeds), ".", color=colour, alpha=0.6)
            panel.plot(estimate.mean, row, "o", color=colour, markersize=6)
            if estimate.low is not None:
                panel.plot([estimate.low, estimate.high], [row, row], color=colour, linewidth=2)
        panel.set_xlabel("times as fast")
        panel.set_ylim(len(verdicts) - 0.5, -0.5)
        panel.set_yticks(range(len(verdicts)), [look.plain(look.shortened(one.name, 30)) for one in verdicts])
    for panel in panels[1:, 0]:
        panel.tick_params(labelleft=False)
    return figure


def scores(tunings: Mapping[str, tuple[int, Tuning]]) -> Figure:
    """Against the first setting that has several numbers, all contenders in one panel; the best of the other ones.

    Scores of SHOWN times the worst of the chosen ones and more lie above the panel.
    """
    figure, panels = look.grid(["score by value"], height=3.8)
    panel, key = panels[0, 0], next(iter(tunings.values()))[1].key
    for place, tuning in tunings.values():
        style = look.line(place)
        values, best = tuning.profile()
        there = np.isfinite(best)
        panel.plot(values[there], best[there], marker="o", markersize=4, **style)
        at = int(np.argmin(best))
        panel.plot(values[at], best[at], "o", color=style["color"], markersize=11, fillstyle="none")
        if tuning.tolerance:
            ends = [tuning.tolerance.low, tuning.tolerance.high]
            panel.fill_between(ends, best[at], best[at] * (1 + WITHIN), color=style["color"], alpha=0.15, linewidth=0)
    look.few_decades(panel)
    found = [best[np.isfinite(best)] for best in (tuning.profile()[1] for _, tuning in tunings.values())]
    lowest = [float(best.min()) for best in found if len(best)]
    if lowest and max(float(best.max()) for best in found if len(best)) > SHOWN * max(lowest):
        bottom, top = min(lowest), SHOWN * max(lowest)
        panel.set_ylim(bottom - 0.05 * (top - bottom), top)
    look.name_axes(panels, look.plain(str(key)), ["training loss (nats per token)"])
    look.legend(figure, {name: look.line(place) for name, (place, _) in tunings.items()}, below=True)
    return figure
