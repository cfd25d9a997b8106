"""Several processes of one run: how they find each other, wait for each other, agree, and end together.

    with distributed.joined(config.distributed) as group:       # a single process does nothing here
        group.barrier("first step")                             # names itself, and those that it waits for
        texts = group.everyone("configs", text)                 # what each process has to say
        result = group.agreed("tokens", work)                   # refused in one: refused in all

Everything waits through the coordination service, on the host and for a limited time, before it computes anything
together: a collective can't be interrupted once it waits for a process that never comes.
"""

import os
import re
import signal
import socket
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, NoReturn, TypeVar

import jax
import numpy as np
from jax.experimental import multihost_utils
from orbax.checkpoint import multihost

from angpt_jax import cli, membership, rendezvous
from angpt_jax.config import DistributedConfig
from angpt_jax.errors import DivergedError, PeerError, StorageError, UserError
from angpt_jax.membership import Membership

T = TypeVar("T")

ENDING_SECONDS = 10  # how long a process that met an error waits for the others to end with it
_KINDS = {kind.__name__: kind for kind in (UserError, StorageError, DivergedError, PeerError)}


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
            missing = re.findall(r"^(?:/job:\S*task:)?(\d+)$", str(error), re.MULTILINE)
            absent = ", ".join(self.name(int(number)) for number in missing) or str(error).splitlines()[0]
            raise PeerError(
                f"distributed.barrier_timeout_seconds: {self.name(self.process)} waits at {name!r} for others that do "
                f"not come, got {seconds} s; missing: {absent}; see what they say, or wait longer"
            ) from error

    def everyone(self, name: str, text: str) -> list[str]:
        """The text of each process, in their order."""
        if self.is_alone:
            return [text]
        self.barrier(name)
        mine = np.frombuffer(text.encode(), np.uint8)
        sizes = multihost_utils.process_allgather(np.array([mine.size], np.int32), tiled=True)
        padded = np.zeros(int(sizes.max()), np.uint8)
        padded[: mine.size] = mine
        rows = multihost_utils.process_allgather(padded)
        return [bytes(row[:size]).decode() for row, size in zip(rows, sizes, strict=True)]

    def same(self, name: str, text: str) -> int | None:
        """The first process whose text differs from that of process 0."""
        texts = self.everyone(name, text)
        return next((number for number, other in enumerate(texts) if other != texts[0]), None)

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
            raise _KINDS.get(kind, UserError)(*(f"{problem} (in {self.name(number)})" for problem in problems))
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
        return (
            f"{processes} process{'es' * (processes > 1)} on {hosts} host{'s' * (hosts > 1)}, {local} × "
            f"{', '.join(kinds)} each, {jax.device_count()} devices"
        )


ALONE = Group()


class AgreedStop:
    """A StopRequest of several processes: a signal to any of them ends all with the same step.

    JAX hears SIGTERM itself and finds the step. A handler in Python would take the signal from it, so SIGINT is handed
    on as SIGTERM.
    """

    def __enter__(self) -> "AgreedStop":
        self._previous = signal.signal(signal.SIGINT, lambda number, frame: signal.raise_signal(signal.SIGTERM))
        return self

    def __exit__(self, *exception: Any) -> None:
        signal.signal(signal.SIGINT, self._previous)

    def at(self, step: int) -> str | None:
        """What ends the run with this step; to be asked once a step, in all processes."""
        return signal.SIGTERM.name if multihost_utils.reached_preemption_sync_point(step) else None


@contextmanager
def joined(config: DistributedConfig) -> Iterator[Group]:
    """The group of this process. If the others don't end with it, as after an error that only this one met, it ends at
    once with the exit code of its error: at a normal exit JAX would wait for them."""
    group = start(config)
    try:
        yield group
    except BaseException as error:
        try:
            group.barrier("end", ENDING_SECONDS)
        except PeerError as missing:
            _end(error, missing)
        raise
    group.barrier("end")


def start(config: DistributedConfig) -> Group:
    """Connects the processes, before any device is touched; a single process does nothing and opens no port."""
    mine = membership.find(config, os.environ)
    if mine is None:
        return ALONE
    if "JAX_CPU_COLLECTIVES_IMPLEMENTATION" not in os.environ:
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
    listens_on = None
    if mine.coordinator is not None:
        assert mine.processes is not None and mine.process is not None
        listens_on = rendezvous.meet(mine.coordinator, mine.processes, mine.process, config.connect_timeout_seconds)
    _initialize(mine, listens_on, config)
    group = Group(jax.process_index(), jax.process_count(), config.barrier_timeout_seconds)
    return replace(group, hosts=tuple(group.everyone("hosts", socket.gethostname())))


def _initialize(mine: Membership, listens_on: str | None, config: DistributedConfig) -> None:
    """JAX ends a process with SIGABRT when its own time is up: ours comes first, with a line that says why."""
    seconds = config.connect_timeout_seconds
    watch = threading.Timer(seconds, _give_up, (mine, seconds))
    watch.daemon = True
    watch.start()
    jax.distributed.initialize(
        mine.coordinator,
        mine.processes if mine.coordinator else None,
        mine.process if mine.coordinator else None,
        cluster_detection_method=None if mine.cluster else "deactivate",
        initialization_timeout=seconds + 60,
        heartbeat_timeout_seconds=config.heartbeat_timeout_seconds,
        shutdown_timeout_seconds=config.barrier_timeout_seconds,
        coordinator_bind_address=listens_on,
    )
    watch.cancel()


def _give_up(mine: Membership, seconds: float) -> None:
    cli.print_problems(
        f"distributed.coordinator: {mine} could not join the others within {seconds:g} s, got "
        f"{mine.coordinator or 'the address that the cluster gives'}; see what the others say, or wait longer "
        "(--distributed.connect_timeout_seconds)"
    )
    _leave(UserError.exit_code)


def _end(error: BaseException, missing: PeerError) -> NoReturn:
    """Says what happened here, and who is still at work or gone; then ends without waiting."""
    if isinstance(error, UserError):
        cli.print_problems(*error.problems)
    else:
        traceback.print_exception(error)
    if not isinstance(error, PeerError):
        cli.print_problems(*missing.problems)
    _leave(error.exit_code if isinstance(error, UserError) else 1)


def _leave(code: int) -> NoReturn:
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
