"""`python -m angpt_jax.bench`: how fast several configs train and decode here, interleaved in one run, as ratios."""

import os
import platform
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

from angpt_jax import cli, json_output, path_rules, rows
from angpt_jax.errors import UserError
from angpt_jax.rows import Row
from angpt_jax.schema import show
from angpt_jax.stopping import EXIT_STOPPED, Stopped, StopRequest
from angpt_jax.tables import print_table
from angpt_jax.timing import results
from angpt_jax.timing.rounds import Plan, measure
from angpt_jax.timing.side import PROMPT, Request

What = Literal["train", "forward", "decode", "data", "constraint"]
Entries = list[dict[str, Any]]
Names = list[What]
Numbers = list[int]


@dataclass(frozen=True)
class BenchConfig:
    """How fast configs train and decode here. Each has processes of its own, in which it compiles; the processes of all
    take turns, in random order. A number is the median over processes of the least of their rounds, a ratio that of
    processes that took turns. Figures of one run can be compared, those of different times or machines can't.

    Args:
        configs: run configs, each a side named after its file, in place of list
        baseline: name of the side that the others are divided by; null is the last
        measures: train (steps with the real data), forward (the loss of a batch), decode (greedy, factors folded in),
            data (batches alone), constraint (the optimizer with it, and without)
        decode_batches: rows that are decoded at a time
        decode_tokens: tokens that each row gets
        processes: of each side
        rounds: of each measure in each process
        round_seconds: at least so long is a round
        most_load: cores that other programs may take meanwhile; rounds with more are repeated
        quick: one process of each side, three short rounds, train and decode alone; all compile at the same time, or
            take what they compiled before
        seed: of the order
        json: file for all that was found
        values: dotted keys and values of every side
        config: configs that a side of list starts from, later wins
        list: sides, each a name, dotted keys and values, and maybe a config of its own
    """

    configs: list[str] = field(default_factory=list)
    baseline: str | None = None
    measures: Names = field(default_factory=lambda: ["train", "forward", "decode", "data", "constraint"])
    decode_batches: Numbers = field(default_factory=lambda: [1, 8])
    decode_tokens: int = 64
    processes: int = 3
    rounds: int = 7
    round_seconds: float = 0.5
    most_load: float = 0.2
    quick: bool = False
    seed: int = 0
    json: str | None = None
    values: dict[str, Any] = field(default_factory=dict)
    config: list[str] = field(default_factory=list)
    list: Entries = field(default_factory=lambda: [])


def bench(config: BenchConfig, name: str) -> int:
    """Measures, prints the table, writes the JSON; returns the exit code."""
    if config.quick:
        config = replace(config, measures=["train", "decode"], processes=1, rounds=3, round_seconds=0.1)
    table, problems = rows.named(config.configs, config.list, config.config, config.values)
    cli.raise_problems([*problems, *check(config, table)])
    how = config.measures, config.decode_batches, config.decode_tokens, config.round_seconds, config.quick
    requests = {row.name: Request(row.words(), *how) for row in table}
    plan = Plan(config.processes, config.rounds, config.most_load, config.seed, compile_together=config.quick)
    try:
        with StopRequest(at_once=True):
            sides = measure(requests, plan, partial(print, file=sys.stderr))
    except Stopped as signal:
        print(f"stopped by {signal}; nothing was written", file=sys.stderr)
        return EXIT_STOPPED
    baseline = config.baseline or table[-1].name
    found = results.report(sides, baseline, {"cpu": _cpu(), "cores": _cores(), "plan": vars(plan)})
    print_table(*results.table(found, baseline))
    print(*_notes(found["machine"]), sep="\n")
    json_output.write(config.json, found)
    return 0


def check(config: BenchConfig, table: list[Row]) -> Iterator[str]:
    """Problems of the values themselves."""
    names = [row.name for row in table]
    if not names:
        yield "list: needs a side or more, got []; name them in list, or as words"
    if config.baseline is not None and names and config.baseline not in names:
        yield f"baseline: no side of that name, got {show(config.baseline)}; one of {', '.join(names)}"
    if not config.measures or len(set(config.measures)) < len(config.measures):
        yield f"measures: must be one or more, all different, got {show(config.measures)}"
    if len(set(config.decode_batches)) < len(config.decode_batches):
        yield f"decode_batches: must be different, got {show(config.decode_batches)}"
    counts = [("decode_batches", count) for count in config.decode_batches]
    counts += [(key, getattr(config, key)) for key in ("decode_tokens", "processes", "rounds")]
    for key, count in counts:
        if count < 1:
            yield f"{key}: must be >= 1, got {count}"
    for key in ("round_seconds", "most_load"):
        if not getattr(config, key) > 0:
            yield f"{key}: must be > 0, got {getattr(config, key)}"
    yield from path_rules.of_output("json", config.json)
    contexts = []
    for row in table:
        try:
            contexts.append(row.config().model.context)
        except UserError as error:
            yield from error.problems
    most = min(contexts, default=0) - PROMPT - 1
    if contexts and "decode" in config.measures and config.decode_tokens > most:
        yield f"decode_tokens: must be at most {most} in a context of {min(contexts)}, got {config.decode_tokens}"


def _notes(machine: dict[str, Any]) -> list[str]:
    """What the numbers of the table mean."""
    peak, load = machine["peak_flops_per_second"] / 1e9, machine["load_of_others"]
    which = "of a product in this run" if machine["peak_is_measured"] else "of the device's data sheet"
    others = "unknown" if load is None else f"{load:.2f} cores on average"
    repeated = f"{machine['repeated_rounds']} rounds were repeated, {machine['rounds']} kept"
    return [
        f"{machine['devices']} × {machine['device_kind']} ({machine['cpu']}, {machine['cores']} cores); MFU is of the "
        f"{peak:,.0f} GFLOP/s {which}.",
        f"Other programs took {others}; {repeated}. Ratios: median (least–most) over the processes.",
    ]


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _cpu() -> str:
    """Its name, where /proc tells."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.machine()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())


if __name__ == "__main__":
    cli.main(bench, BenchConfig, command="bench", default_config="default", words="configs")
