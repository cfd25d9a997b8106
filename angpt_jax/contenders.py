"""The runs of a comparison: which contenders, which seeds, in which folders; whether all of them see the same batches
in the same order."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from angpt_jax import cli, metrics, rows, trials, tuning
from angpt_jax.config import Config
from angpt_jax.errors import UserError
from angpt_jax.rows import Row
from angpt_jax.schema import show
from angpt_jax.trials import Trial
from angpt_jax.tuning import Values

SEEDS = ("run.seed", "data.shuffle_seed")
# What decides the batches and where they are judged, beside the section data.
SAME = ("model.context", "model.vocab", "run.steps", "run.eval_every_steps", "run.stop_at_step")


class Key(NamedTuple):
    """Which run: `steps` are those of its schedule."""

    contender: str
    steps: int
    seed: int


def checked(table: Sequence[Row], baseline: str) -> dict[str, Config]:
    """The config of each contender, seeds aside. A UserError lists what is wrong in any of them, and where one would
    not see the baseline's batches."""
    configs, problems = {}, []
    for row in table:
        problems += [
            f"{row.name}: {key}: is decided by seeds, got {show(row.values[key])}; leave it out"
            for key in SEEDS
            if key in row.values
        ]
        try:
            configs[row.name] = row.config()
        except UserError as error:
            problems += error.problems
    for name, config in configs.items() if baseline in configs else ():
        problems += [
            f"{name}: {key}: must be that of {baseline}, or the batches differ, got {show(own)}; it is {show(theirs)} "
            "there"
            for key, theirs, own in cli.changed(configs[baseline], config)
            if key in SAME or (key.startswith("data.") and key not in SEEDS)
        ]
    cli.raise_problems(problems)
    return configs


def shorter(
    table: Sequence[Row], configs: Mapping[str, Config], baseline: str, budgets: Sequence[float]
) -> dict[str, list[int]]:
    """Steps of the shorter schedules of each contender, ascending: none of the baseline. A UserError says where a
    schedule can't be as short, or two are the same."""
    run = configs[baseline].run
    counts = [round(fraction * run.steps) for fraction in sorted(budgets)]
    problems = []
    if len({0, run.steps, *counts}) < len(counts) + 2:
        problems.append(f"budgets: must be different numbers of steps below {run.steps}, got {show(counts)}")
    if counts and run.stop_at_step is not None:
        problems.append(f"budgets: need schedules that end, got run.stop_at_step {run.stop_at_step}; leave one out")
    found = {row.name: counts for row in table if row.name != baseline}
    for row in table if not problems else ():
        for count in found.get(row.name, ()):
            try:
                row.but(f"{row.name}/steps{count}", {"run.steps": count}).config()
            except UserError as error:
                problems += error.problems
    cli.raise_problems(problems)
    return found


def reported(
    table: Sequence[Row],
    chosen: Mapping[str, Values],
    seeds: Sequence[int],
    steps: int,
    budgets: Mapping[str, list[int]],
) -> dict[Key, Row]:
    """The runs that the table is made of, seed by seed. What was chosen for a contender is part of the folder's name,
    so that another choice is another run; `budgets` are the shorter schedules of each contender."""
    found = {}
    for seed in seeds:
        seeded = dict.fromkeys(SEEDS, seed)
        for row in table:
            values = chosen.get(row.name, {})
            folder = f"{row.name}/{rows.name_of(values)}" if values else row.name
            found[Key(row.name, steps, seed)] = row.but(f"{folder}/seed{seed}", {**values, **seeded})
            for count in budgets.get(row.name, ()):
                shorter = row.but(f"{folder}/steps{count}/seed{seed}", {**values, **seeded, "run.steps": count})
                found[Key(row.name, count, seed)] = shorter
    return found


def tuned(
    table: Sequence[Row], over: Mapping[str, Sequence[Any]], configs: Mapping[str, Config], steps: int | None
) -> list[Row]:
    """The runs of `tuning.grid(over)` for each contender, in that order; `steps` are those of the whole run where null.
    They are evaluated at their end alone, as nobody asks."""
    found = []
    for row in table:
        last = steps or configs[row.name].run.last_step
        fixed = {"run.eval_every_steps": last, "run.log_every_steps": min(5, 1 + last // 1000)}
        fixed |= dict.fromkeys(SEEDS, tuning.SEED)
        if steps is not None:
            fixed |= {"run.steps": steps, "run.stop_at_step": None}
        for values in tuning.grid(over):
            found.append(row.but(f"{row.name}/tune/{rows.name_of(values)}", {**values, **fixed}))
    return found


def planned(named: Mapping[Key, Row], folder: Path) -> dict[Key, Trial]:
    return dict(zip(named, trials.plan(list(named.values()), folder), strict=True))


def training_score(trial: Trial, state: trials.State) -> float:
    """See `tuning.score`; infinite where the run did not finish."""
    if state != "finished":
        return float("inf")
    return tuning.score(metrics.read(trial.directory / "metrics.jsonl"), trial.config.run.last_step)
