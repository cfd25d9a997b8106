"""Several processes of one run: how they find each other at the start, and end together.

with distributed.joined(config.distributed) as group:       # a single process does nothing here
"""

import os
import socket
import sys
import threading
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import NoReturn

import jax

from angpt_jax.config import DistributedConfig
from angpt_jax.errors import PeerError, UserError, print_problems
from angpt_jax.processes import membership, rendezvous
from angpt_jax.processes.group import ALONE, Group
from angpt_jax.processes.membership import Membership

ENDING_SECONDS = 10  # how long a process that met an error waits for the others to end with it


@contextmanager
def joined(config: DistributedConfig) -> Iterator[Group]:
    """The group of this process. If the others don't end with it, as after an error that only this one met, it ends at
    once with the exit code of its error: at a normal exit JAX would wait for them."""
    group = start(config)
    try:
        if not group.is_alone:
            group = replace(group, hosts=tuple(group.everyone("hosts", socket.gethostname())))
        yield group
    except BaseException as error:
        try:
            group.barrier("end", min(ENDING_SECONDS, config.heartbeat_timeout_seconds))
        except PeerError as missing:
            _end(error, missing)
        raise
    try:
        group.barrier("end")
    except PeerError as missing:
        _end(missing)


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
    return Group(jax.process_index(), jax.process_count(), config.barrier_timeout_seconds)


def _initialize(mine: Membership, listens_on: str | None, config: DistributedConfig) -> None:
    """JAX ends a process with SIGABRT when its own time is up: ours comes first, with a line that says why."""
    seconds = config.connect_timeout_seconds
    watch = threading.Timer(seconds, _give_up, (mine, seconds))
    watch.daemon = True
    watch.start()
    known = {}
    if mine.coordinator:
        asked = "JAX_LOCAL_DEVICE_IDS" in os.environ
        own_gpu = mine.cluster.local if mine.cluster and not asked else None
        known = {"coordinator_address": mine.coordinator, "num_processes": mine.processes, "process_id": mine.process}
        known |= {"local_device_ids": own_gpu, "cluster_detection_method": "deactivate"}
    try:
        jax.distributed.initialize(
            **known,
            initialization_timeout=seconds + 60,
            heartbeat_timeout_seconds=config.heartbeat_timeout_seconds,
            shutdown_timeout_seconds=config.barrier_timeout_seconds,
            coordinator_bind_address=listens_on,
        )
    except (RuntimeError, ValueError) as error:
        said = " ".join(str(error).split())
        raise UserError(f"distributed.coordinator: JAX can't join {mine} ({said}), got {mine.coordinator}") from error
    finally:
        watch.cancel()


def _give_up(mine: Membership, seconds: float) -> None:
    print_problems(
        f"distributed.coordinator: {mine} could not join the others within {seconds:g} s, got "
        f"{mine.coordinator or 'the address that the cluster gives'}; see what the others say, or wait longer "
        "(--distributed.connect_timeout_seconds)"
    )
    _leave(UserError.exit_code)


def _end(*errors: BaseException) -> NoReturn:
    """Says what happened here, and who is still at work or gone; then ends without waiting."""
    for error in errors:
        if isinstance(error, UserError):
            print_problems(*error.problems)
        else:
            traceback.print_exception(error)
    _leave(errors[0].exit_code if isinstance(errors[0], UserError) else PeerError.exit_code)


def _leave(code: int) -> NoReturn:
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
