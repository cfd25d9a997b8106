"""The processes of a run, from within one of them: they wait for each other, tell each other, and agree.

    group.barrier("first step")                             # names itself, and those that it waits for
    texts = group.everyone("configs", text)                 # what each process has to say
    result = group.agreed("tokens", work)                   # refused in one: refused in all

Everything waits through the coordination service, on the host and for a limited time, before it computes anything
together: a collective can't be interrupted once it waits for a process that never comes.
"""

import re
import signal
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import jax
import numpy as np
from jax.experimental import multihost_utils
from orbax.checkpoint import multihost

from angpt_jax.errors import DivergedError, PeerError, StorageError, UserError

T = TypeVar("T")

KINDS = {kind.__name__: kind for kind in (UserError, StorageError, DivergedError, PeerError)}


@dataclass(frozen=True)
class Group:
    """The processes of a run; without arguments a single one, which waits for nobody.

    Args:
        process: number of this one
        processes: how many there are
        barrier_seconds: how long they wait for each other
        hosts: the machine of each
    """

    process: int = 0
    processes: int = 1
    barrier_seconds: int = 600
    hosts: tuple[str, ...] = ()

    @property
    def is_alone(self) -> bool:
        return self.processes == 1

    @property
    def is_first(self) -> bool:
        """Whether this is the process that writes and prints."""
        return self.process == 0

    def say(self, text: str) -> None:
        """Prints in process 0 only."""
        if self.is_first:
            print(text, flush=not self.is_alone)

    def name(self, process: int) -> str:
        return f"process {process}" + (f" on {self.hosts[process]}" if self.hosts else "")

    def barrier(self, name: str, seconds: int | None = None) -> None:
        """Waits until all processes are at the barrier of this name, which no other may have; a PeerError says who did
        not come."""
        if self.is_alone:
            return
        seconds = self.barrier_seconds if seconds is None else seconds
        try:
            multihost.get_barrier_sync_fn()(key=f"angpt_jax: {name}", timeout_ms=1000 * seconds)
        except jax.errors.JaxRuntimeError as error:
            absent = ", ".join(map(self.name, missing(str(error)))) or " ".join(str(error).split())
            raise PeerError(
                f"distributed.barrier_timeout_seconds: all must come to {name!r}, got no sign of {absent} for "
                f"{seconds} s; see what they say, or wait longer"
            ) from error

    def everyone(self, name: str, text: str) -> list[str]:
        """The text of each process, in their order."""
        if self.is_alone:
            return [text]
        self.barrier(name)
        mine = np.frombuffer(text.encode(), np.uint8)
        sizes = multihost_utils.process_allgather(np.array([mine.size], np.int32), tiled=True)
        if not sizes.any():
            return [""] * self.processes
        padded = np.zeros(int(sizes.max()), np.uint8)
        padded[: mine.size] = mine
        rows = multihost_utils.process_allgather(padded)
        return [bytes(row[:size]).decode() for row, size in zip(rows, sizes, strict=True)]

    def agreed(self, name: str, work: Callable[[], T]) -> T:
        """The result of `work` once all processes have done it; if one refuses, all raise what it says."""
        if self.is_alone:
            return work()
        result, error = None, None
        try:
            result = work()
        except UserError as caught:
            error = caught
        kinds = self.everyone(name, "\n".join([type(error).__name__, *error.problems]) if error else "")
        failed = [(number, text.split("\n")) for number, text in enumerate(kinds) if text]
        if error is not None:
            raise error
        if failed:
            number, (kind, *problems) = failed[0]
            raise KINDS.get(kind, UserError)(*(f"{problem} (in {self.name(number)})" for problem in problems))
        return result  # type: ignore[return-value]

    def in_turn(self, name: str, work: Callable[[], T]) -> T:
        """`agreed`, process 0 before the others, who find what it left in a cache that they share."""
        first = self.agreed(f"{name}, process 0", work if self.is_first else lambda: None)
        rest = self.agreed(f"{name}, others", work if not self.is_first else lambda: None)
        return first if self.is_first else rest  # type: ignore[return-value]

    def banner(self) -> str:
        """Processes, hosts, devices."""
        kinds = sorted({device.device_kind for device in jax.devices()})
        hosts, local, processes = len(set(self.hosts)) or 1, jax.local_device_count(), self.processes
        devices = f"{local} × {', '.join(kinds)}"
        if self.is_alone:
            return devices
        several = f"{processes} processes on {hosts} host{'s' * (hosts > 1)}"
        return f"{several}, {devices} each, {jax.device_count()} devices"


ALONE = Group()


def missing(said: str) -> list[int]:
    """The processes that did not come, in what the coordination service says of a barrier: those that it waited for
    (each in a line of its own), or those that it lost."""
    numbers = re.findall(r"(?m)(?:^|\bTask: )(?:/job:\S*task:)?(\d+)\b[,.]?(?= |$)", said)
    return sorted({int(number) for number in numbers})


class AgreedStop:
    """A StopRequest of several processes: a signal to any of them ends all with the same step.

    JAX hears SIGTERM itself and finds the step. A handler in Python would take the signal from it, so SIGINT is handed
    on as SIGTERM.
    """

    def __init__(self) -> None:
        self._asked, self._stopped = 0, False

    def __enter__(self) -> "AgreedStop":
        self._previous = signal.signal(signal.SIGINT, lambda number, frame: signal.raise_signal(signal.SIGTERM))
        return self

    def __exit__(self, *exception: Any) -> None:
        signal.signal(signal.SIGINT, self._previous)

    def only_note(self) -> None:
        """As of a StopRequest: this one never raises."""

    def asked(self) -> str | None:
        """What ends the run; to be asked equally often in all processes: they agree on the number of a question."""
        self._asked += 1
        if not self._stopped:
            self._stopped = multihost_utils.reached_preemption_sync_point(self._asked)
        return signal.SIGTERM.name if self._stopped else None
