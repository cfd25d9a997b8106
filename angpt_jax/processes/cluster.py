"""The cluster that started this process as one of several, found in the environment. Without JAX, which does the same
once it is asked to: asked on a machine of its own, it would open a port and wait for others.
"""

import urllib.error
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from pathlib import Path

Environment = Mapping[str, str]

_SLURM = ("SLURM_JOB_ID", "SLURM_STEP_NODELIST", "SLURM_NTASKS", "SLURM_PROCID", "SLURM_LOCALID")  # of a job step
_GOOGLE = "0x1ae0"  # PCI vendor of TPU chips, and of other devices of a Google machine
_METADATA = "http://metadata.google.internal/computeMetadata/v1/instance/attributes/"


@dataclass(frozen=True)
class Cluster:
    """What started this process.

    Args:
        name: for people
        processes: how many, None where only JAX finds that out
        process: number of this one, likewise
        local: number of this one on its machine, where each has one GPU of its own
        finds_coordinator: whether JAX finds the address of process 0 there
    """

    name: str
    processes: int | None = None
    process: int | None = None
    local: int | None = None
    finds_coordinator: bool = True


def cluster_of(environment: Environment) -> Cluster | None:
    """The cluster that started this process as one of several; None for a single one, and for a shell on a cluster."""
    for find in (_slurm, _open_mpi, _tpu_of_kubernetes, _kubernetes, _tpu_machines):
        if cluster := find(environment):
            return cluster if cluster.processes != 1 else None
    return None


def _slurm(environment: Environment) -> Cluster | None:
    if not all(name in environment for name in _SLURM):
        return None
    tasks = int(environment.get("SLURM_STEP_NUM_TASKS", environment["SLURM_NTASKS"]))
    return Cluster("SLURM", tasks, int(environment["SLURM_PROCID"]), int(environment["SLURM_LOCALID"]))


def _open_mpi(environment: Environment) -> Cluster | None:
    """From version 5 on, mpirun does not tell its address."""
    size, rank, local = (environment.get(f"OMPI_COMM_WORLD_{name}") for name in ("SIZE", "RANK", "LOCAL_RANK"))
    if size is None or rank is None or local is None:
        return None
    return Cluster("Open MPI", int(size), int(rank), int(local), "OMPI_MCA_orte_hnp_uri" in environment)


def _tpu_of_kubernetes(environment: Environment) -> Cluster | None:
    hosts = environment.get("TPU_PROCESS_ADDRESSES", environment.get("TPU_WORKER_HOSTNAMES", ""))
    if not hosts or "TPU_WORKER_ID" not in environment:
        return None
    several = "," in hosts or int(environment.get("MEGASCALE_NUM_SLICES") or 1) > 1
    return Cluster("TPU", None if several else 1)


def _kubernetes(environment: Environment) -> Cluster | None:
    """A pod of an indexed job, which is how jobs of several pods are numbered."""
    if "KUBERNETES_SERVICE_HOST" not in environment or "JOB_COMPLETION_INDEX" not in environment:
        return None
    return Cluster("Kubernetes", finds_coordinator=find_spec("kubernetes") is not None)


def _tpu_machines(environment: Environment) -> Cluster | None:
    """Machines of a TPU pod without Kubernetes: they know of each other through the metadata server only."""
    if "TPU_SKIP_MDS_QUERY" in environment or not _is_google_machine():
        return None
    slices = [line for line in _metadata("tpu-env").splitlines() if line.startswith("MEGASCALE_NUM_SLICES:")]
    several_slices = any(line.partition(":")[2].strip(" '\"") not in ("", "1") for line in slices)
    return Cluster("TPU") if several_slices or "," in _metadata("worker-network-endpoints") else None


@cache
def _is_google_machine() -> bool:
    vendors = Path("/sys/bus/pci/devices").glob("*/vendor")
    return any(vendor.read_text().strip() == _GOOGLE for vendor in vendors)


@cache
def _metadata(name: str) -> str:
    """An attribute of this Google machine; empty if it has none."""
    request = urllib.request.Request(_METADATA + name, headers={"Metadata-Flavor": "Google"})
    try:
        with urllib.request.urlopen(request, timeout=2) as answer:
            return answer.read().decode()
    except (urllib.error.URLError, OSError):
        return ""
