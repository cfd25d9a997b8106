"""`python -m angpt_jax.scaling`: scaling laws of finished runs, with intervals: a table, JSON, PNG files and a page."""

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from angpt_jax import cli, finished, path_rules
from angpt_jax.errors import StorageError, UserError
from angpt_jax.files import write_whole
from angpt_jax.finished import Counted
from angpt_jax.laws.fits import FITS, Fitted, Settings
from angpt_jax.laws.loss import LossLaw
from angpt_jax.laws.points import Point
from angpt_jax.plots.installed import need_matplotlib
from angpt_jax.plots.page import Cell, Shown, page
from angpt_jax.schema import show
from angpt_jax.tables import UNKNOWN, print_table

PAGE, RECORD = "scaling.html", "scaling.json"
EQUATIONS = {
    "law": "L(N, D) = E + A/N^α + B/D^β",
    "isoflop": "N_opt = factor · C^exponent",
    "batch": "B_opt = factor · N^exponent",
    "lr": "lr_opt = factor · N^exponent",
}
LETTERS = {"alpha": "α", "beta": "β", "a": "a = β/(α + β)"}
Fits = dict[str, dict[str, Fitted]]  # of each architecture, by name of the fit


@dataclass(frozen=True)
class ScalingConfig:
    """Scaling laws of finished runs: L(N, D), IsoFLOP minima, best batch size and learning rate.

    Args:
        runs: run directories, and folders that hold run directories at any depth
        out: folder for scaling.json, the PNG files and scaling.html, which holds them all
        parameters: what N counts: total, or non_embedding (without the matrices of embedding and head)
        resamples: of the bootstrap
        confidence: share of the resamples that an interval holds
        seed: of the bootstrap
        held_out_fraction: share of the points that a second fit does not see, those of the most compute (at least one)
    """

    runs: list[str]
    out: str = "scaling"
    parameters: Counted = "total"
    resamples: int = 200
    confidence: float = 0.9
    seed: int = 0
    held_out_fraction: float = 0.2


def scaling(config: ScalingConfig, name: str) -> int:
    """Prints the table, writes the folder and prints the path of its page; returns the exit code."""
    folders, problems = finished.folders(config.runs)
    cli.raise_problems([*problems, *check(config)])
    points, left_out, problems = finished.read(folders, config.parameters)
    reasons = [f"{run}: {reason}" for run, reason in left_out]
    if not points:
        raise UserError("runs: holds no finished run, got none", *(f"runs: {reason}" for reason in reasons))
    cli.raise_problems(problems)
    fits, missing = fit(points, Settings(config.resamples, config.confidence, config.seed, config.held_out_fraction))
    if not any(fits.values()):
        raise UserError(*missing, *(f"runs: {reason}" for reason in reasons))
    need_matplotlib("scaling")
    facts = {key: value for key, value in asdict(config).items() if key not in ("runs", "out")}
    facts |= {"left_out": [{"run": run, "reason": reason} for run, reason in left_out], "missing": missing}
    record = facts | {"architectures": {arch: of_architecture(points[arch], fits[arch]) for arch in points}}
    write(Path(config.out), record, fits, [*missing, *(f"left out: {reason}" for reason in reasons)])
    print_table(("architecture", "fit", "quantity", "value", "interval", "error on unseen"), rows(fits), TEXTS)
    for line in [*missing, *(f"left out: {reason}" for reason in reasons)]:
        print(line)
    print(Path(config.out) / PAGE)
    return 0


TEXTS = ("fit", "quantity")


def check(config: ScalingConfig) -> list[str]:
    """Problems of the values themselves."""
    problems = [
        f"{key}: must be above 0 and below 1, got {value}"
        for key, value in (("confidence", config.confidence), ("held_out_fraction", config.held_out_fraction))
        if not 0 < value < 1
    ]
    for key, value, least in ("resamples", config.resamples, 2), ("seed", config.seed, 0):
        if value < least:
            problems.append(f"{key}: must be at least {least}, got {value}")
    return [*problems, *path_rules.of_path("out", config.out), *path_rules.of_page("out", config.out, PAGE)]


def fit(points: dict[str, list[Point]], settings: Settings) -> tuple[Fits, list[str]]:
    """All that the points of each architecture are enough for, and what is missing for the rest."""
    fits: Fits = {arch: {} for arch in points}
    missing: list[str] = []
    for arch, found in points.items():
        for name, make in FITS.items():
            try:
                fits[arch][name] = make(found, settings)
            except UserError as error:
                missing += [f"{arch}: {problem}" for problem in error.problems]
    return fits, missing


def of_architecture(points: list[Point], fits: dict[str, Fitted]) -> dict[str, Any]:
    """As it stands in scaling.json."""
    return {"runs": [asdict(point) for point in points], "fits": {name: _record(fit) for name, fit in fits.items()}}


def _record(fitted: Fitted) -> dict[str, Any]:
    estimates = {
        name: {"value": value, "interval": fitted.intervals.get(name)} for name, value in fitted.estimates.items()
    }
    held_out = fitted.held_out
    record: dict[str, Any] = {"equation": EQUATIONS[fitted.name], "estimates": estimates, "runs": len(fitted.runs)}
    record |= {"resamples": fitted.resamples, "held_out": None, "notes": fitted.notes}
    if held_out is not None:
        seen = {key: getattr(held_out, key).tolist() for key in ("at", "predicted", "measured")}
        record["held_out"] = {"error": held_out.error} | seen
    if not isinstance(fitted.fit, LossLaw):
        record["optima"] = [{"at": one.at, "best": one.x, "loss": one.loss} for one in fitted.fit.optima]
    return record


def rows(fits: Fits) -> list[tuple[str, ...]]:
    """Of the table: a line for each number."""
    return [
        (arch, EQUATIONS[name], LETTERS.get(quantity, quantity), f"{value:.4g}", _interval(fitted, quantity), error)
        for arch, by_name in fits.items()
        for name, fitted in by_name.items()
        for error in [f"{fitted.held_out.error:.2%}" if fitted.held_out else UNKNOWN]
        for quantity, value in fitted.estimates.items()
    ]


def _interval(fitted: Fitted, quantity: str) -> str:
    found = fitted.intervals.get(quantity)
    return f"{found[0]:.4g} … {found[1]:.4g}" if found else UNKNOWN


def write(folder: Path, record: dict[str, Any], fits: Fits, notes: list[str]) -> None:
    """scaling.json, the pictures and the page."""
    from angpt_jax.plots import laws  # not before: Matplotlib takes a second to load

    try:
        folder.mkdir(parents=True, exist_ok=True)
        shown = laws.draw(fits, folder)
        write_whole(folder / RECORD, json.dumps(record, indent=2) + "\n")
        write_whole(folder / PAGE, _page(record, fits, notes, shown))
    except OSError as error:
        raise StorageError(f"out: can't be written, got {show(str(folder))}; {error.strerror}") from error


def _page(record: dict[str, Any], fits: Fits, notes: list[str], shown: list[Shown]) -> str:
    header = ("architecture", "fit", "quantity", "value", f"{record['confidence']:.0%} interval", "error on unseen")
    cells = ([Cell(text) for text in row] for row in rows(fits))
    return page("Scaling laws", header, cells, [*_notes(fits), *notes], shown)


def _notes(fits: Fits) -> Iterator[str]:
    for arch, by_name in fits.items():
        for name, fitted in by_name.items():
            yield from (f"{arch}: {name}: {note}" for note in fitted.notes)


if __name__ == "__main__":
    cli.main(scaling, ScalingConfig, command="scaling", default_config=None, words="runs")
