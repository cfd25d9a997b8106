"""Who measures when: processes of all sides take turns, in random order, and what another program disturbed is measured
again."""

import os
import random
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

from angpt_jax import host_memory
from angpt_jax.timing.load import busy_seconds
from angpt_jax.timing.side import Request, Side

Round = Mapping[str, float]


@dataclass(frozen=True)
class Plan:
    """How much is measured.

    Args:
        processes: of each side
        rounds: of each measure in a process
        most_load: cores that others may take in a round; what is above is measured again, at most as often as there are
            rounds
        seed: of the order
        compile_together: whether processes that take turns compile at the same time, which shares the cores
    """

    processes: int
    rounds: int
    most_load: float
    seed: int
    compile_together: bool = False


@dataclass
class Rounds:
    """What one process measured.

    Args:
        facts: what it found while it compiled
        kept: the rounds of each measure
        loads: cores that others took in each round that was kept, where that can be known
        repeated: rounds that were measured again
    """

    facts: Mapping[str, Any]
    kept: dict[str, list[Round]] = field(default_factory=dict)
    loads: list[float] = field(default_factory=list)
    repeated: int = 0

    def least(self, measure: str, name: str = "seconds") -> float:
        """Over the rounds."""
        return min(round[name] for round in self.kept[measure])


def measure(requests: Mapping[str, Request], plan: Plan, say: Callable[[str], None]) -> dict[str, list[Rounds]]:
    """The rounds of each process of each side. On a CPU one process of each side is there at a time, and they take
    turns round by round; an accelerator has room for one process, so that there whole processes take turns."""
    order = random.Random(plan.seed)
    found: dict[str, list[Rounds]] = {name: [] for name in requests}
    for number in range(1, plan.processes + 1):
        names = order.sample(list(requests), len(requests))
        for group in [names] if host_memory.computes_on_cpu() else [[name] for name in names]:
            say(f"process {number} of {plan.processes}: {', '.join(group)}")
            with ExitStack() as alive:
                sides = []
                for name in group:
                    sides.append(alive.enter_context(Side(name, requests[name])))
                    if not plan.compile_together:
                        assert sides[-1].facts
                for side, rounds in zip(sides, _take_turns(sides, plan, order), strict=True):
                    found[side.name].append(rounds)
    return found


def _take_turns(sides: Sequence[Side], plan: Plan, order: random.Random) -> list[Rounds]:
    of = {side.name: Rounds(side.facts) for side in sides}
    for _ in range(plan.rounds):
        for name in dict.fromkeys(name for side in sides for name in side.names):
            for side in order.sample(sides, len(sides)):
                if name in side.names:
                    _measure(side, name, of[side.name], plan)
    return list(of.values())


def _measure(side: Side, name: str, rounds: Rounds, plan: Plan) -> None:
    """One round; another one where it was disturbed, as long as there were not too many of them."""
    while True:
        before = _others()
        found = side.round(name)
        load = None if before is None else ((_others() or before) - before - found["core_seconds"]) / found["elapsed"]
        if load is None or load <= plan.most_load or rounds.repeated >= plan.rounds * len(side.names):
            break
        rounds.repeated += 1
    rounds.kept.setdefault(name, []).append(found)
    if load is not None:
        rounds.loads.append(max(load, 0.0))


def _others() -> float | None:
    """Seconds of work of all cores that were not this process's."""
    busy, ours = busy_seconds(), os.times()
    return None if busy is None else busy - ours.user - ours.system
