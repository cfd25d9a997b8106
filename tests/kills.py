"""Runs that are killed at random moments, again and again, and started again."""

import json
import random
import re
import signal
import time
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from processes import SECONDS, Processes, free_port

from angpt_jax import metrics

SAVE_EVERY = 1


@dataclass
class Killed:
    """What happened to a run.

    Args:
        lost: steps that were logged before a kill and not in the checkpoint that the next start found
        codes: exit codes of processes whose peer was killed
    """

    lost: list[int] = field(default_factory=list)
    codes: list[int] = field(default_factory=list)


def logged(run: Path) -> int:
    """The last step in the metrics."""
    return max((record["step"] for record in metrics.read(run / "metrics.jsonl")), default=0)


def resumed_at(out: str) -> int:
    found = re.search(r"resumed at step (\d+)", out)
    return int(found[1]) if found else 0


def killed(folder: Path, name: str, kills: int, layout: tuple[int, int], flags: tuple[str, ...], seed: int) -> Killed:
    """Starts `runs/NAME` in (processes, devices of each), kills it `kills` times, and lets it end."""
    run, rng, found, before = folder / "runs" / name, random.Random(seed), Killed(), 0
    processes, devices = layout
    flags = ("--run.dir", f"runs/{name}", "--run.checkpoint_every_steps", str(SAVE_EVERY), *flags)
    for number in range(kills + 1):
        started = Processes(free_port())
        try:
            for process in range(processes):
                started.start(folder, process, processes, devices, *flags)
            if number < kills:
                kill(started, run, before + rng.randint(2, 6), rng, processes)
            outcomes = started.outcomes()
        finally:
            started.kill()
        if number:
            found.lost.append(before - resumed_at(outcomes[0].out))
        if number < kills:
            found.codes += [outcome.code for outcome in outcomes if outcome.code != -signal.SIGKILL]
            before = logged(run)
            with suppress(FileNotFoundError), (run / "metrics.jsonl").open("a") as file:
                file.write('{"step": 1, "lo' * (number % 2))  # as where the kill came in a write
        else:
            assert [outcome.code for outcome in outcomes] == [0] * processes, outcomes
    return found


def kill(started: Processes, run: Path, step: int, rng: random.Random, processes: int) -> None:
    """At a random moment after `step`: one process, or all of them."""
    deadline = time.monotonic() + SECONDS
    while logged(run) < step:
        assert time.monotonic() < deadline, started.outcomes(0)
        time.sleep(0.01)
    time.sleep(rng.uniform(0, 0.3))
    for process in rng.sample(range(processes), rng.randint(1, processes)):
        started.signal(process, signal.SIGKILL)


def numbers(run: Path) -> list[dict[str, Any]]:
    """What the metrics say of each step, without times; every line is whole and each step stands once."""
    lines = (run / "metrics.jsonl").read_text().split("\n")
    assert lines.pop() == ""
    records = [json.loads(line) for line in lines]
    kinds = [(record["step"], "val_loss" in record) for record in records]
    assert kinds == sorted(set(kinds))
    kept = ("step", "tokens", "loss", "lr", "grad_norm", "skipped_steps", "val_loss", "val_bits_per_byte")
    return [{name: record[name] for name in kept if name in record} for record in records]
