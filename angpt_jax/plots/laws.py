"""The pictures of scaling laws, in their order."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from angpt_jax.laws.fits import Fitted
from angpt_jax.laws.loss import LossLaw
from angpt_jax.laws.optima import Curve, Optima, Optimum
from angpt_jax.laws.points import column, labels
from angpt_jax.plots import look
from angpt_jax.plots.page import Shown
from angpt_jax.plots.pictures import put

DOTS: dict[str, Any] = {"linestyle": "none", "marker": "o", "markersize": 4}
UNSEEN = DOTS | {"markerfacecolor": "none", "markersize": 7}
LABELS = {
    "isoflop": ("compute C (FLOPs)", "parameters N", "N_opt"),
    "batch": ("parameters N", "batch size (tokens)", "B_opt (tokens)"),
    "lr": ("parameters N", "peak learning rate", "lr_opt"),
}
TITLES = {
    "isoflop": (
        "Parameters at equal FLOPs",
        "Left: losses of runs of equal FLOPs, and a parabola for each budget with its minimum (diamond). Right: the "
        "minima, and the power law through them.",
    ),
    "batch": (
        "Best batch size",
        "Left: losses of runs that differ in their batch size alone, and a parabola through the best and its "
        "neighbours. Right: their minima, and the power law through them.",
    ),
    "lr": (
        "Best learning rate",
        "Left: losses of runs that differ in their peak learning rate alone, and a parabola through the best and its "
        "neighbours. Right: their minima, and the power law through them.",
    ),
}


def draw(fits: dict[str, dict[str, Fitted]], folder: Path) -> list[Shown]:
    """Writes each picture that there is a fit for, and removes those of an earlier call that have none."""
    laws = {arch: found["law"] for arch, found in fits.items() if "law" in found}
    shown = []
    pictures: list[tuple[str, dict[str, Fitted], Callable[[dict[str, Fitted]], Figure], str, str]] = [
        ("loss_against_tokens", laws, loss_against_tokens, "Loss against tokens", TOKENS),
        ("fitted_against_measured", laws, fitted_against_measured, "Fitted against measured loss", MEASURED),
    ]
    for name, (title, caption) in TITLES.items():
        chosen = {arch: found[name] for arch, found in fits.items() if name in found}
        pictures.append((name, chosen, partial(curves_and_optima, name=name), title, caption))
    for name, chosen, make, title, caption in pictures:
        path = folder / f"{name}.png"
        path.unlink(missing_ok=True)
        if chosen:
            shown.append(put(partial(make, chosen), path, title, caption))
    return shown


TOKENS = "Final losses of the runs, and L(N, D) = E + A/N^α + B/D^β as a line for each parameter count."
MEASURED = (
    "Losses of the law beside those of the runs; a law that holds puts all on the diagonal. Rings: the runs of "
    "most compute, as a law says that was fitted without them."
)


def loss_against_tokens(laws: dict[str, Fitted]) -> Figure:
    """A column for each architecture, a line for each parameter count."""
    figure, panels = look.grid(list(laws), height=4.2, margin=1.5)
    sizes = sorted({run.parameters for fitted in laws.values() for run in fitted.runs})
    numbers = dict(zip(sizes, labels(sizes).tolist(), strict=True))
    looks = {f"{size:.3g} parameters": look.line(numbers[size]) for size in sizes[::-1]}
    for fitted, panel in zip(laws.values(), panels[:, 0], strict=True):
        tokens = column(fitted.runs, "tokens")
        along = np.geomspace(tokens.min(), tokens.max(), 80)
        for size in sorted({run.parameters for run in fitted.runs}):
            chosen = [run for run in fitted.runs if run.parameters == size]
            style = look.line(numbers[size])
            panel.plot(column(chosen, "tokens"), column(chosen, "loss"), **style | DOTS)
            assert isinstance(fitted.fit, LossLaw)
            panel.plot(along, fitted.fit(size, along), **style)
        panel.set_xscale("log")
    look.name_axes(panels, "tokens D", ["loss (nats per token)"])
    look.legend(figure, looks)
    return figure


def fitted_against_measured(laws: dict[str, Fitted]) -> Figure:
    """All architectures in one panel."""
    figure, panels = look.grid(["law and runs"], height=4.2, margin=1.5)
    panel, looks = panels[0, 0], {}
    for number, (arch, fitted) in enumerate(laws.items()):
        colour = look.COLOURS[number % len(look.COLOURS)]
        looks[arch] = DOTS | {"color": colour}
        assert isinstance(fitted.fit, LossLaw)
        predicted = fitted.fit(column(fitted.runs, "parameters"), column(fitted.runs, "tokens"))
        panel.plot(column(fitted.runs, "loss"), predicted, **DOTS, color=colour)
        if fitted.held_out is not None:
            panel.plot(fitted.held_out.measured, fitted.held_out.predicted, **UNSEEN, color=colour)
    low, high = panel.get_xlim()
    panel.plot([low, high], [low, high], color=look.GREY, linewidth=0.8)
    look.name_axes(panels, "measured loss (nats per token)", ["fitted loss"])
    look.legend(figure, looks | {"unseen by its law": UNSEEN | {"color": look.GREY}})
    return figure


def curves_and_optima(found: dict[str, Fitted], name: str) -> Figure:
    """Two panels for each architecture: its curves, and their optima."""
    titles = [title for arch in found for title in (arch, f"{arch}, optima")]
    figure, panels = look.grid(titles, height=3.6, shared=False)
    at, x, best = LABELS[name]
    for fitted, left, right in zip(found.values(), panels[::2, 0], panels[1::2, 0], strict=True):
        fit = fitted.fit
        assert isinstance(fit, Optima)
        for number, (curve, optimum) in enumerate(zip(fit.curves, fit.optima, strict=True)):
            colour = look.STEPS(number / max(1, len(fit.optima) - 1))
            _parabola(left, curve, optimum, colour)
            right.plot(optimum.at, optimum.x, **DOTS, color=colour)
        ends = np.array([min(one.at for one in fit.optima), max(one.at for one in fit.optima)])
        right.plot(ends, fit.law(ends), color=look.GREY, label=f"exponent {fit.law.exponent:.3f}")
        right.legend()
        left.set(xlabel=x, ylabel="loss (nats per token)")
        look.few_decades(left)
        right.set(xlabel=at, ylabel=best, xscale="log", yscale="log")
    return figure


def _parabola(panel: Axes, curve: Curve, optimum: Optimum, colour: Any) -> None:
    along = np.geomspace(*optimum.ends, 60)
    panel.plot(*curve.means()[:2], **DOTS, color=colour)
    panel.plot(along, optimum(along), color=colour)
    panel.plot(optimum.x, optimum.loss, color=colour, marker="D", markersize=6, markeredgecolor="black")
