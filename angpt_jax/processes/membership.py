"""Which process of how many this one is: from flags, the environment or the cluster that started it. Without JAX.

Flags (`--distributed.*`) win over $JAX_COORDINATOR_ADDRESS, $JAX_NUM_PROCESSES and $JAX_PROCESS_ID, and those over what
a cluster says. `processes` 1 is a single process wherever it runs.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from angpt_jax.config import DistributedConfig
from angpt_jax.errors import UserError
from angpt_jax.processes.cluster import Cluster, Environment, cluster_of

ADDRESS, COUNT, NUMBER = "JAX_COORDINATOR_ADDRESS", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID"


@dataclass(frozen=True)
class Membership:
    """One process of several. What is None, JAX finds out from the cluster.

    Args:
        coordinator: HOST:PORT of process 0
        processes: how many there are
        process: number of this one
        cluster: what started them, None for flags or the environment alone
    """

    coordinator: str | None
    processes: int | None
    process: int | None
    cluster: Cluster | None

    def __str__(self) -> str:
        number = "a process" if self.process is None else f"process {self.process}"
        count = "several" if self.processes is None else str(self.processes)
        return f"{number} of {count}" + (f" ({self.cluster.name})" if self.cluster else "")


def find(config: DistributedConfig, environment: Environment) -> Membership | None:
    """What this process is, None for a single one; a UserError if it can't be known."""
    address = config.coordinator or environment.get(ADDRESS) or None
    count, counts_wrong = _whole("processes", config.processes, COUNT, environment)
    number, number_wrong = _whole("process", config.process, NUMBER, environment)
    lines = [*counts_wrong, *number_wrong]
    if not lines and count == 1 and number in (None, 0):
        return None
    cluster = cluster_of(environment)
    lines += _impossible(address, count, number)
    lines = lines or [*_missing(address, count, number, cluster)]
    if lines:
        raise UserError(*lines)
    if cluster is not None:
        count = cluster.processes if count is None else count
        number = cluster.process if number is None else number
    return None if cluster is None and address is None else Membership(address, count, number, cluster)


def problems(config: DistributedConfig, environment: Environment) -> list[str]:
    """What is wrong with the flags and the environment, as lines for a UserError."""
    try:
        find(config, environment)
    except UserError as error:
        return list(error.problems)
    return []


def split_address(address: str) -> tuple[str, int] | None:
    """Host and port of HOST:PORT or [IPV6]:PORT; None for anything else."""
    host, _, port = address.rpartition(":")
    bare = host.removeprefix("[").removesuffix("]")
    is_host = bare.replace("-", "").replace(".", "").replace(":", "").replace("_", "").isalnum()
    is_port = port.isascii() and port.isdecimal() and 1 <= int(port) <= 65535
    return (bare, int(port)) if is_host and is_port and (host != bare) == (":" in bare) else None


def join_address(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _whole(name: str, given: int | None, variable: str, environment: Environment) -> tuple[int | None, tuple[str, ...]]:
    """The flag, or else the variable; and the problem if that is no whole number."""
    text = environment.get(variable)
    if given is not None or not text:
        return given, ()
    if text.isascii() and text.isdecimal():
        return int(text), ()
    return None, (f"distributed.{name}: must be a whole number, got {text!r} in ${variable}",)


def _impossible(address: str | None, count: int | None, number: int | None) -> Iterator[str]:
    if address is not None and split_address(address) is None:
        yield f"distributed.coordinator: must be HOST:PORT of process 0, got {address!r}; such as 10.0.0.1:8476"
    if count is not None and count < 1:
        yield f"distributed.processes: must be >= 1, got {count}"
    elif number is not None and count is not None and not 0 <= number < count:
        rule = "must be >= 0 and < distributed.processes"
        several = f"{count} processes; 0 … {count - 1}" if count > 1 else "1 process; 0"
        yield f"distributed.process: {rule}, got {number} with {several}"
    elif number is not None and number < 0:
        yield f"distributed.process: must be >= 0, got {number}"


def _missing(address: str | None, count: int | None, number: int | None, cluster: Cluster | None) -> Iterator[str]:
    named = {
        f"distributed.coordinator (or ${ADDRESS})": address,
        f"distributed.processes (or ${COUNT})": count,
        f"distributed.process (or ${NUMBER})": number,
    }
    absent = " and ".join(name for name, value in named.items() if value is None)
    got = ", ".join(str(value) for value in named.values() if value is not None)
    if cluster is None and absent and got:
        yield f"{absent}: needed beside the others, got {got}; give all three, or none for a single process"
    elif cluster is not None and address is None and not cluster.finds_coordinator:
        what = f"HOST:PORT of process 0 is needed in this {cluster.name} job, got null"
        yield f"distributed.coordinator (or ${ADDRESS}): {what}; or --distributed.processes 1 for a single process"
    elif cluster is not None and address is not None and absent and cluster.processes is None:
        yield f"{absent}: needed beside the address, got {got}; or give none of them, {cluster.name} knows them"
