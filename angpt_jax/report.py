"""`python -m angpt_jax.report`: plots of one or several runs, as PNG files and one page that can be mailed."""

import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from angpt_jax import cli, path_rules
from angpt_jax.errors import StorageError, UserError
from angpt_jax.files import write_whole
from angpt_jax.plots import history
from angpt_jax.plots.history import History, number
from angpt_jax.plots.installed import need_matplotlib
from angpt_jax.plots.page import Cell, Shown, page
from angpt_jax.schema import show
from angpt_jax.tables import UNKNOWN

PAGE = "report.html"
OFF = "only the loss can be shown. Train with --run.instrument_every_steps to see norms, α, updates and moments."
HEADER = (
    *("run", "architecture", "parameters", "steps", "tokens"),
    *("validation loss (nats per token)", "bits per byte", "median step time"),
)


@dataclass(frozen=True)
class ReportConfig:
    """Plots of one or several runs: loss, norms by depth, α, updates, Adam's moments.

    Args:
        runs: run directories; plots put them side by side in this order
        out: folder for the PNG files and for report.html, which holds them all
    """

    runs: list[str]
    out: str = "report"


def report(config: ReportConfig, name: str) -> int:
    """Writes the report and prints its path; returns the exit code."""
    runs, problems = read(config.runs)
    cli.raise_problems([*problems, *path_rules.of_page("out", config.out, PAGE)])
    need_matplotlib("report")
    from angpt_jax.plots import look, pictures  # not before: Matplotlib takes a second to load

    path = Path(config.out) / PAGE
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, render(runs, look.COLOURS, pictures.draw(runs, path.parent)))
    except OSError as error:
        raise StorageError(f"out: can't be written, got {show(config.out)}; {error.strerror}") from error
    print(path)
    return 0


def read(folders: Sequence[str]) -> tuple[list[History], list[str]]:
    """The runs, and what is wrong with their folders."""
    runs: list[History] = []
    problems = [] if folders else ["runs: needs at least one run directory, got none"]
    seen: dict[str, str] = {}
    for folder in folders:
        place = os.path.abspath(folder)
        if place in seen:
            problems.append(f"runs: given twice, got {show(seen[place])} and {show(folder)}; name each run once")
            continue
        seen[place] = folder
        try:
            runs.append(history.load(folder, len(runs)))
        except UserError as error:
            problems += error.problems
    return history.name_apart(runs), problems


def render(runs: Sequence[History], colours: Sequence[str], pictures: Sequence[Shown]) -> str:
    """The page: a row for each run in the colour of its lines, then the pictures."""
    rows = [_row(run, colours[run.place % len(colours)]) for run in runs]
    off = [run.name for run in runs if not run.instruments]
    notes = [f"Instruments were off in {', '.join(off)}: {OFF}"] if off else []
    return page(", ".join(run.name for run in runs), HEADER, rows, notes, pictures)


def _row(run: History, colour: str) -> list[Cell]:
    facts = run.facts()
    planned = number(run.setting("run", "steps"))
    return [
        Cell(run.name, run.folder if run.folder != run.name else "", colour),
        Cell(str(facts["arch"] or UNKNOWN)),
        Cell(_said("{:,.0f}", facts["parameters"])),
        Cell(_said("{:,.0f}", facts["steps"]), f"of {planned:,.0f}" if planned > number(facts["steps"]) else ""),
        Cell(_said("{:,.0f}", facts["tokens"])),
        Cell(_said("{:.4f}", facts["val_loss"])),
        Cell(_said("{:.4f}", facts["val_bits_per_byte"])),
        Cell(_said("{:,.1f} ms", 1000 * number(facts["median_step_seconds"]))),
    ]


def _said(form: str, value: Any) -> str:
    return form.format(number(value)) if math.isfinite(number(value)) else UNKNOWN


if __name__ == "__main__":
    cli.main(report, ReportConfig, command="report", default_config=None, words="runs")
