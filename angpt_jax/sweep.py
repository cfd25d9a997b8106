"""`python -m angpt_jax.sweep`: trains the runs of a list, a zip, a grid; here, or as commands for elsewhere."""

import json
import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from angpt_jax import cli, grids, links, path_rules, rows, slurm_array
from angpt_jax.errors import StorageError, UserError
from angpt_jax.files import write_whole
from angpt_jax.rows import Row
from angpt_jax.schema import show
from angpt_jax.stopping import EXIT_STOPPED, Stopped, StopRequest
from angpt_jax.tables import UNKNOWN, print_table

if TYPE_CHECKING:
    from angpt_jax.trials import Outcome, Trial

EXIT_FAILED = 1
RESULTS = "results.json"
FACTS = ("steps", "val_loss", "val_bits_per_byte", "median_step_seconds")
Rows = list[dict[str, Any]]  # the field `list` hides the type of that name


@dataclass(frozen=True)
class SweepConfig:
    """Trains many configs: the rows of list, each with the values of zip, each with all combinations of grid. Exit code
    0: every run finished or diverged; 1: one failed; 75: stopped. Run it again to go on, what is done is not repeated.

    Args:
        config: config names or files that every run starts from, later wins; none is what train starts from
        values: dotted keys and values of every run, {run.steps: 200}
        grid: dotted key and list of values, {optim.peak_lr: [2e-3, 4e-3]}; all combinations, the first key slowest
        zip: dotted key and list of values, taken together; lists of the same length
        list: rows with a name, dotted keys and values, and perhaps a config of their own, as in configs/ablations
        dir: folder of the run directories, of their logs and of results.json; null is runs/sweep/ + the name of the
            config
        at_a_time: runs that train together and share the cores of this machine
        print: commands prints one command per run, slurm a job script for sbatch with one run a task of its array; then
            nothing is trained or written. Sweep again afterwards for the table
    """

    config: list[str] = field(default_factory=lambda: [])
    values: dict[str, Any] = field(default_factory=dict)
    grid: dict[str, list[Any]] = field(default_factory=dict)
    zip: dict[str, list[Any]] = field(default_factory=dict)
    list: Rows = field(default_factory=lambda: [])
    dir: str | None = None
    at_a_time: int = 1
    print: Literal["none", "commands", "slurm"] = "none"


def sweep(config: SweepConfig, name: str) -> int:
    """Trains the runs and prints a table of them; returns the exit code. `name` names the default folder."""
    folder = Path(config.dir or f"runs/sweep/{name}")
    planned, problems = expand(config)
    cli.raise_problems([*problems, *check(config, folder)])
    try:
        with StopRequest(at_once=True) as stop:
            from angpt_jax import trials  # not before: JAX takes a second to load

            runs = trials.plan(planned, folder)
            if config.print != "none":
                lines = [run.line() for run in runs]
                text = slurm_array.script(lines, str(Path.cwd())) if config.print == "slurm" else "\n".join(lines)
                print(text.rstrip("\n"))
                return 0
            stop.only_note()
            ends = trials.run_all(runs, stop, partial(print, flush=True), config.at_a_time)
    except Stopped as signal:
        print(f"stopped by {signal} before the first run; run the same command again", file=sys.stderr)
        return EXIT_STOPPED
    report(runs, ends, [*config.zip, *config.grid], folder)
    if all(end.state in ("finished", "diverged") for end in ends.values()):
        return 0
    return EXIT_STOPPED if stop.received else EXIT_FAILED


def expand(config: SweepConfig) -> tuple[Sequence[Row], Sequence[str]]:
    """The rows of all runs, and what is wrong with them."""
    if not (config.list or config.zip or config.grid):
        return [], ["list, zip, grid: must have something to run, got none of them"]
    bases, problems = rows.read(config.list, config.config, config.values)
    if not config.list:
        bases = [Row("", tuple(config.config), rows.dotted(config.values, "values")[0])]
    found, wrong = grids.expand(bases, config.zip, config.grid)
    return found, [*problems, *wrong]


def check(config: SweepConfig, folder: Path) -> Sequence[str]:
    """Problems of the values themselves."""
    problems = [*path_rules.of_path("dir", config.dir)]
    if ".." in folder.parts:
        problems.append(f"dir: must not contain '..', got {show(config.dir)}; give the folder itself")
    if not problems and folder.exists() and not folder.is_dir():
        problems.append(f"dir: is a file, got {show(str(folder))}; name a folder")
    if not problems and (leading_out := links.leading_out(folder)):
        problems.append(f"dir: holds links that lead out of it ({', '.join(leading_out[:3])}), got {show(str(folder))}")
    if config.at_a_time < 1:
        problems.append(f"at_a_time: must be at least 1, got {config.at_a_time}")
    return problems


def report(runs: "Sequence[Trial]", ends: "Mapping[str, Outcome]", keys: Sequence[str], folder: Path) -> None:
    """Prints the table, and what those said that did not finish; writes `results.json`."""
    results = [result(run, ends[run.name], keys) for run in runs]
    finished = [one for one in results if one["state"] == "finished" and one["val_bits_per_byte"] is not None]
    best = min(finished, key=lambda one: one["val_bits_per_byte"], default=None)
    heads = ["name", *rows.short_keys(keys).values(), "state", "steps", "val loss", "bits/byte", "ms/step"]
    print_table(heads, [_cells(one, one is best) for one in results], words=("state",))
    for one in results:
        if one["state"] not in ("finished", "new"):
            print(f"{one['name']}: {one['state']} {one['said']}; {one['directory']}.log")
    path = folder / RESULTS
    try:
        write_whole(path, json.dumps({"best": best and best["name"], "runs": results}, indent=2) + "\n")
    except OSError as error:
        raise StorageError(f"dir: can't be written, got {show(str(path))} ({error.strerror})") from error
    print(path)


def result(run: "Trial", end: "Outcome", keys: Sequence[str]) -> dict[str, Any]:
    """A run as it stands in `results.json`: null where nothing is known, or a number is not finite."""
    from angpt_jax.plots import history  # not before: what is only printed needs none of it

    try:
        facts = history.load(str(run.directory)).facts()
    except UserError:
        facts = {}
    numbers = {name: history.number(facts.get(name)) for name in FACTS}
    known = {"name": run.name, "directory": str(run.directory), "values": {key: run.row.values[key] for key in keys}}
    known |= {"state": end.state, "said": end.said, "command": run.line()}
    return known | {name: value if math.isfinite(value) else None for name, value in numbers.items()}


def _cells(one: Mapping[str, Any], is_best: bool) -> Sequence[str]:
    forms = ("{:,.0f}", "{:.4f}", "{:.4f}", "{:,.1f}")
    steps, loss, bits, seconds = (one[name] for name in FACTS)
    numbers = (steps, loss, bits, None if seconds is None else 1000 * seconds)
    values = [value if isinstance(value, str) else json.dumps(value) for value in one["values"].values()]
    said = [UNKNOWN if value is None else form.format(value) for form, value in zip(forms, numbers, strict=True)]
    return [one["name"], *values, one["state"] + ", best" * is_best, *said]


if __name__ == "__main__":
    cli.main(sweep, SweepConfig, command="sweep", default_config=None)
