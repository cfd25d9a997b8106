"""`python -m angpt_jax.compare`: several configs × seeds on the same batches in the same order; speed-up at equal loss
with its spread."""

import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from angpt_jax import cli, path_rules, rows, tuning
from angpt_jax.errors import DivergedError, PeerError
from angpt_jax.rows import Row
from angpt_jax.schema import show
from angpt_jax.stopping import EXIT_STOPPED, StopRequest

if TYPE_CHECKING:
    from angpt_jax.standings import Standings
    from angpt_jax.trials import Trial

Entries = list[dict[str, Any]]
TUNABLE = ("optim.", "model.places.")


@dataclass(frozen=True)
class CompareConfig:
    """Which config trains better: several of them, several seeds, the same batches in the same order.

    Args:
        configs: run configs, each a contender named after its file, in place of list
        baseline: name of the contender that the others are compared with; null is the first
        seeds: of weights and of the order of the data; in each, all contenders see the same batches
        tune: first trains every contender with each of tune_over on another seed and takes what has the lowest training
            loss over the last tenth of the steps; the validation set is not read for it
        tune_over: dotted key and list of values to try, the same for every contender; of several keys every combination
        tune_steps: steps of a tuning run, with a schedule of that length; null is the whole run
        budgets: fractions of run.steps at which all but the baseline are trained too, each with a schedule that ends
            there, e.g. [0.5, 0.7]: a second, stricter speed-up
        confidence: of the intervals over seeds, Student's t
        dir: folder of all runs and of the results; null is runs/compare/ + the name of the config
        at_a_time: runs that train at the same time, sharing the cores
        values: dotted keys and values of every contender
        config: configs that a contender of list starts from, later wins
        list: contenders, each a name, dotted keys and values, and maybe a config of its own
    """

    configs: list[str] = field(default_factory=list)
    baseline: str | None = None
    seeds: list[int] = field(default_factory=lambda: [0, 1, 2])
    tune: bool = False
    tune_over: dict[str, Any] = field(default_factory=lambda: {"optim.peak_lr": [1e-3, 2e-3, 4e-3, 8e-3, 16e-3]})
    tune_steps: int | None = None
    budgets: list[float] = field(default_factory=list)
    confidence: float = 0.9
    dir: str | None = None
    at_a_time: int = 1
    values: dict[str, Any] = field(default_factory=dict)
    config: list[str] = field(default_factory=list)
    list: Entries = field(default_factory=lambda: [])


def compare(config: CompareConfig, name: str) -> int:
    """Trains what has not finished, prints the tables, writes compare.json and the page; returns the exit code."""
    table, problems = contenders_of(config)
    cli.raise_problems([*problems, *check(config, table)])
    folder = Path(config.dir or f"runs/compare/{'+'.join(row.name for row in table) if config.configs else name}")
    with StopRequest() as stop:
        standings = _trained(config, table, folder, stop)
    if standings is None:
        print(f"stopped by {stop.received}; run the same command again to go on", file=sys.stderr)
        return EXIT_STOPPED
    from angpt_jax import announce

    announce.show(standings)
    announce.write(standings, folder)
    if not standings.verdicts[standings.baseline].runs:
        ends = {name: outcome.state for name, outcome in standings.outcomes_of(standings.baseline).items()}
        error = DivergedError if set(ends.values()) == {"diverged"} else PeerError
        shown = ", ".join(f"{name} {state}" for name, state in ends.items())
        raise error(f"baseline: no run of it finished, so nothing can be compared with it, got {shown}")
    return 0


def contenders_of(config: CompareConfig) -> tuple[list[Row], list[str]]:
    return rows.named(config.configs, config.list, config.config, config.values)


def check(config: CompareConfig, table: list[Row]) -> Iterator[str]:
    """Problems of the values themselves."""
    names = [row.name for row in table]
    if len(names) < 2:
        yield f"list: needs two contenders or more, got {show(names)}; name them in list, or as words"
    if config.baseline is not None and names and config.baseline not in names:
        yield f"baseline: no contender of that name, got {show(config.baseline)}; one of {', '.join(names)}"
    if not config.seeds or len(set(config.seeds)) < len(config.seeds):
        yield f"seeds: must be one or more, all different, got {show(config.seeds)}"
    for seed in config.seeds:
        if not 0 <= seed < tuning.SEED:
            yield f"seeds: must be >= 0 and < {tuning.SEED}, the seed of tuning, got {seed}"
    for fraction in config.budgets:
        if not 0 < fraction < 1:
            yield f"budgets: must be > 0 and < 1, got {fraction}"
    if not 0 < config.confidence < 1:
        yield f"confidence: must be > 0 and < 1, got {config.confidence}"
    for key, value in (("at_a_time", config.at_a_time), ("tune_steps", config.tune_steps)):
        if value is not None and value < 1:
            yield f"{key}: must be >= 1, got {value}"
    yield from _problems_of_lists(config.tune_over)
    yield from path_rules.of_path("dir", config.dir)
    if config.dir is not None and (".." in config.dir.split("/") or Path(config.dir).is_file()):
        yield f"dir: must be a folder, without '..', got {show(config.dir)}"


def _problems_of_lists(over: Mapping[str, Any]) -> Iterator[str]:
    lists = tuning.lists(over)
    if not lists:
        yield "tune_over: needs a key and a list of values, got {}"
    for key, values in lists.items():
        if not key.startswith(TUNABLE):
            yield f"tune_over.{key}: must be a key of {' or '.join(TUNABLE)}, got {show(values)}"
        elif not isinstance(values, list) or not values:
            yield f"tune_over.{key}: must be a list of values to try, got {show(values)}"
        elif len({rows.name_of({key: value}) for value in values}) < len(values):
            yield f"tune_over.{key}: two values have the same name, got {show(values)}; each once"


def _trained(config: CompareConfig, table: list[Row], folder: Path, stop: StopRequest) -> "Standings | None":
    """Tunes, trains and judges; null where a signal came first."""
    from angpt_jax import contenders, standings, trials  # not before: JAX takes a second to load, a bad value none

    baseline = config.baseline or table[0].name
    configs = contenders.checked(table, baseline)
    budgets = contenders.shorter(table, configs, baseline, config.budgets)
    run_all = partial(trials.run_all, stop=stop, say=partial(print, file=sys.stderr), at_a_time=config.at_a_time)
    over = tuning.lists(config.tune_over)
    tuned: list[Trial] = []
    if config.tune:
        tuned = trials.plan(contenders.tuned(table, over, configs, config.tune_steps), folder)
    outcomes = run_all(tuned)
    if stop.received:
        return None
    scores = [contenders.training_score(trial, outcomes[trial.name].state) for trial in tuned]
    count = len(tuning.grid(over))
    tunings = {
        row.name: tuning.choose(over, scores[place * count :][:count])
        for place, row in enumerate(table if tuned else [])
    }
    if tunings and tunings[baseline].chosen is None:
        ends = ", ".join(f"{trial.name} {outcomes[trial.name].state}" for trial in tuned[: len(table) * count])
        raise DivergedError(f"tune_over: no run of the baseline {baseline} finished, got {ends}; try other values")
    chosen = {name: found.chosen for name, found in tunings.items() if found.chosen is not None}
    racing = [row for row in table if not tuned or row.name in chosen]
    named = contenders.reported(racing, chosen, config.seeds, configs[baseline].run.steps, budgets)
    planned = contenders.planned(named, folder)
    outcomes |= run_all(list(planned.values()))
    if stop.received:
        return None
    return standings.of(table, baseline, planned, outcomes, tunings, config.confidence)


if __name__ == "__main__":
    cli.main(compare, CompareConfig, command="compare", default_config=None, words="configs")
