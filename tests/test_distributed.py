"""Which process this one is, from flags, environment and clusters; and how processes meet before JAX connects."""

import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import jax
import pytest
from orbax.checkpoint import multihost
from processes import free_port

from angpt_jax import rules
from angpt_jax.config import DistributedConfig
from angpt_jax.errors import PeerError, StorageError, UserError
from angpt_jax.processes import cluster, distributed, membership, rendezvous
from angpt_jax.processes.cluster import Cluster, cluster_of
from angpt_jax.processes.group import ALONE, Group
from angpt_jax.processes.membership import Membership, find, problems, split_address

SLURM = {
    "SLURM_JOB_ID": "7",
    "SLURM_STEP_NODELIST": "n[1-2]",
    "SLURM_NTASKS": "8",
    "SLURM_PROCID": "3",
    "SLURM_LOCALID": "1",
}
MPI = {"OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_RANK": "2", "OMPI_COMM_WORLD_LOCAL_RANK": "0"}
GKE = {"TPU_WORKER_HOSTNAMES": "a,b", "TPU_WORKER_ID": "0"}
POD = {"KUBERNETES_SERVICE_HOST": "10.0.0.1", "JOB_COMPLETION_INDEX": "0"}
THREE = {"JAX_COORDINATOR_ADDRESS": "h:1", "JAX_NUM_PROCESSES": "2", "JAX_PROCESS_ID": "1"}


@pytest.fixture(autouse=True)
def no_google_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cluster, "_is_google_machine", lambda: False)


@pytest.mark.parametrize(
    ("environment", "found"),
    [
        ({}, None),
        (SLURM, Cluster("SLURM", 8, 3, 1)),
        (SLURM | {"SLURM_NTASKS": "1"}, None),
        (SLURM | {"SLURM_STEP_NUM_TASKS": "1"}, None),  # an interactive shell in a job of eight
        ({name: value for name, value in SLURM.items() if name != "SLURM_STEP_NODELIST"}, None),  # no job step: sbatch
        (MPI, Cluster("Open MPI", 4, 2, 0, finds_coordinator=False)),
        (MPI | {"OMPI_MCA_orte_hnp_uri": "1.0;tcp://10.0.0.1:1"}, Cluster("Open MPI", 4, 2, 0)),
        (MPI | {"OMPI_COMM_WORLD_SIZE": "1"}, None),
        (GKE, Cluster("TPU")),
        (GKE | {"TPU_WORKER_HOSTNAMES": "localhost"}, None),
        (GKE | {"TPU_WORKER_HOSTNAMES": "a", "MEGASCALE_NUM_SLICES": "2"}, Cluster("TPU")),
        (GKE | {"TPU_WORKER_HOSTNAMES": "localhost"} | POD, None),  # a pod of one host, in an indexed job
        ({"TPU_WORKER_HOSTNAMES": "a,b"}, None),
        ({"KUBERNETES_SERVICE_HOST": "10.0.0.1"}, None),
        (POD, Cluster("Kubernetes", finds_coordinator=False)),
    ],
)
def test_a_cluster_is_one_only_where_it_started_several_processes(environment, found, monkeypatch) -> None:
    monkeypatch.setattr(cluster, "find_spec", lambda name: None)
    assert cluster_of(environment) == found


@pytest.mark.parametrize(
    ("workers", "tpu_env", "found"),
    [("a,b", "", Cluster("TPU")), ("a", "MEGASCALE_NUM_SLICES: '2'", Cluster("TPU")), ("a", "", None), ("", "", None)],
)
def test_machines_of_a_tpu_pod_know_of_each_other_through_their_metadata(workers, tpu_env, found, monkeypatch) -> None:
    monkeypatch.setattr(cluster, "_is_google_machine", lambda: True)
    monkeypatch.setattr(cluster, "_metadata", {"worker-network-endpoints": workers, "tpu-env": tpu_env}.get)
    assert cluster_of({}) == found
    assert cluster_of({"TPU_SKIP_MDS_QUERY": "1"}) is None


@pytest.mark.parametrize(
    ("config", "environment", "found"),
    [
        (DistributedConfig(), {}, None),
        (DistributedConfig("h:2", 4, 3), {}, Membership("h:2", 4, 3, None)),
        (DistributedConfig(), THREE, Membership("h:1", 2, 1, None)),
        (DistributedConfig("h:2", 4, 3), THREE, Membership("h:2", 4, 3, None)),
        (DistributedConfig(process=0), THREE, Membership("h:1", 2, 0, None)),
        (DistributedConfig(), SLURM, Membership(None, 8, 3, Cluster("SLURM", 8, 3, 1))),
        (DistributedConfig("h:2"), SLURM, Membership("h:2", 8, 3, Cluster("SLURM", 8, 3, 1))),
        (DistributedConfig(processes=1), SLURM, None),
        (DistributedConfig(processes=1, process=0), {}, None),
    ],
)
def test_flags_win_over_the_environment_and_that_over_the_cluster(config, environment, found) -> None:
    assert find(config, environment) == found


@pytest.mark.parametrize(
    ("config", "environment", "line"),
    [
        (
            DistributedConfig("h:1", 2, 2),
            {},
            "distributed.process: must be >= 0 and < distributed.processes, got 2 with 2 processes; 0 … 1",
        ),
        (
            DistributedConfig("h:1", 1, 1),
            {},
            "distributed.process: must be >= 0 and < distributed.processes, got 1 with 1 process; 0",
        ),
        (DistributedConfig("h:1", 0, 0), {}, "distributed.processes: must be >= 1, got 0"),
        (
            DistributedConfig("nonsense", 2, 0),
            {},
            "distributed.coordinator: must be HOST:PORT of process 0, got 'nonsense'; such as 10.0.0.1:8476",
        ),
        (
            DistributedConfig(),
            THREE | {"JAX_PROCESS_ID": "x"},
            "distributed.process: must be a whole number, got 'x' in $JAX_PROCESS_ID",
        ),
        (
            DistributedConfig(processes=2),
            {},
            "distributed.coordinator (or $JAX_COORDINATOR_ADDRESS) and distributed.process (or $JAX_PROCESS_ID): "
            "needed beside the others, got 2; give all three, or none for a single process",
        ),
        (
            DistributedConfig(),
            MPI,
            "distributed.coordinator (or $JAX_COORDINATOR_ADDRESS): HOST:PORT of process 0 is needed in this Open MPI "
            "job, got null; or --distributed.processes 1 for a single process",
        ),
        (
            DistributedConfig("h:1"),
            GKE,
            "distributed.processes (or $JAX_NUM_PROCESSES) and distributed.process (or $JAX_PROCESS_ID): needed beside "
            "the address, got h:1; or give none of them, TPU knows them",
        ),
    ],
)
def test_what_can_not_be_is_refused_in_one_line(config, environment, line) -> None:
    assert problems(config, environment) == [line]


@pytest.mark.parametrize("address", ["h", "h:", ":1", "h:0", "h:65536", "h:x", "a b:1", "http://h:1", "::1:5", "[h]:1"])
def test_an_address_is_a_host_and_a_port(address: str) -> None:
    assert split_address(address) is None


def test_addresses_of_both_kinds_are_taken() -> None:
    assert split_address("node-1.local:80") == ("node-1.local", 80)
    assert split_address("[::1]:80") == ("::1", 80)
    assert membership.join_address("::1", 80) == "[::1]:80"


def meet(port: int, members: list[tuple[int, int]], seconds: float = 5) -> list[str]:
    """What processes (how many they expect, own number) end with: where they meet, or the problem."""

    def one(member: tuple[int, int]) -> str:
        try:
            return rendezvous.meet(f"127.0.0.1:{port}", *member, seconds)
        except UserError as error:
            return str(error)

    with ThreadPoolExecutor(len(members)) as pool:
        return list(pool.map(one, members))


def test_processes_meet_in_any_order_and_leave_the_port_free() -> None:
    port = free_port()
    for _ in range(2):
        assert meet(port, [(3, 2), (3, 0), (3, 1)]) == [f"127.0.0.1:{port}"] * 3


def test_those_that_came_learn_who_is_missing() -> None:
    port = free_port()
    said = f"distributed.processes: 4 must come to 127.0.0.1:{port} within 1 s, got 2; missing: 1, 3 "
    assert all(answer.startswith(said) for answer in meet(port, [(4, 2), (4, 0)], seconds=1))


def test_a_number_given_twice_and_another_count_are_refused() -> None:
    twice = meet(free_port(), [(3, 0), (3, 1), (3, 1)])
    assert all(answer.startswith("distributed.process: must differ, got 1 twice, on ") for answer in twice)
    counts = meet(free_port(), [(2, 0), (3, 1)])
    assert counts == ["distributed.processes: must be the same in all, got 2 in process 0 and 3 in 1"] * 2


def test_a_stranger_at_the_port_is_passed_over() -> None:
    port = free_port()

    def knock() -> None:
        while True:
            try:
                with socket.create_connection(("127.0.0.1", port), timeout=1) as connection:
                    connection.sendall(b"GET 2 1 host\n")
                return
            except OSError:
                continue

    stranger = threading.Thread(target=knock)
    stranger.start()
    answers = meet(port, [(2, 0)], seconds=1)
    stranger.join()
    assert answers[0].endswith("got 1; missing: 1 (--distributed.connect_timeout_seconds waits longer)")


def test_a_port_in_use_and_an_unknown_host_are_refused_at_once() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        (answer,) = meet(port, [(2, 0)])
    assert answer == (
        f"distributed.coordinator: process 0 can't listen there (Address already in use), got 127.0.0.1:{port}; a free "
        "port on an address of its host"
    )
    with pytest.raises(UserError, match=r"^distributed.coordinator: unknown host .*, got no\.such\.host\.invalid:1; "):
        rendezvous.meet("no.such.host.invalid:1", 2, 1, 5)


def test_a_single_process_waits_for_nobody(monkeypatch) -> None:
    monkeypatch.setattr(multihost, "get_barrier_sync_fn", None)
    ALONE.barrier("anything")
    assert ALONE.everyone("texts", "mine") == ["mine"]
    assert ALONE.in_turn("work", lambda: 3) == 3
    with pytest.raises(StorageError):
        ALONE.agreed("work", lambda: (_ for _ in ()).throw(StorageError("full")))


class Told(Group):
    """A group of two whose other process says what it is told to."""

    other = ""

    def everyone(self, name: str, text: str) -> list[str]:
        return [text, self.other]


def test_what_another_process_refuses_is_refused_here_with_its_code() -> None:
    group = Told(0, 2, hosts=("a", "b"))
    assert group.agreed("work", lambda: 3) == 3
    Told.other = "StorageError\ndata: full"
    with pytest.raises(StorageError) as caught:
        group.agreed("work", lambda: 3)
    assert caught.value.problems == ("data: full (in process 1 on b)",)


LATE = """DEADLINE_EXCEEDED: Barrier timed out. Id: angpt_jax: save::0. This usually happens because a task …
# of tasks that reached the barrier: 2/4.
The first task at the barrier: 0. Some timed out task names:
3
1


RPC: /xla.coordination.CoordinationService/Barrier [type.googleapis.com/…='']
"""
LOST = (
    "INTERNAL: Barrier failed because: task is set to ERROR. Task: 1 Error: heartbeat timeout [x='']. Barrier Id: "
    "angpt_jax: end::0, Task: 1\n"
)


@pytest.mark.parametrize(
    ("said", "named"),
    [(LATE, "process 1 on b, process 3 on d"), (LOST, "process 1 on b"), ("UNAVAILABLE:\n gone", "UNAVAILABLE: gone")],
)
def test_a_barrier_names_itself_and_those_that_did_not_come(said, named, monkeypatch) -> None:
    def wait(*, key: str, timeout_ms: int) -> None:
        assert (key, timeout_ms) == ("angpt_jax: save", 7000)
        raise jax.errors.JaxRuntimeError(said)

    monkeypatch.setattr(multihost, "get_barrier_sync_fn", lambda: wait)
    with pytest.raises(PeerError) as caught:
        Group(0, 4, 7, hosts=tuple("abcd")).barrier("save")
    line = f"distributed.barrier_timeout_seconds: all must come to 'save', got no sign of {named} for 7 s; "
    assert str(caught.value).startswith(line) and caught.value.exit_code == 1


def test_a_single_process_does_not_touch_jax_distributed(monkeypatch) -> None:
    monkeypatch.setattr(jax.distributed, "initialize", None)
    with distributed.joined(DistributedConfig()) as group:
        assert group is ALONE


def test_jax_is_not_left_to_abort_when_its_time_is_up(monkeypatch, capsys) -> None:
    """A cluster's address, where processes can't meet beforehand."""
    left, done = [], threading.Event()

    def leave(code: int) -> None:
        left.append(code)
        done.set()

    monkeypatch.setattr(jax.distributed, "initialize", lambda **given: done.wait(10))
    monkeypatch.setattr(distributed, "_leave", leave)
    mine = Membership(None, 8, 3, Cluster("SLURM", 8, 3, 1))
    distributed._initialize(mine, None, DistributedConfig(connect_timeout_seconds=1))
    assert left == [2]
    assert capsys.readouterr().err == (
        "angpt_jax: error: distributed.coordinator: process 3 of 8 (SLURM) could not join the others within 1 s, got "
        "the address that the cluster gives; see what the others say, or wait longer "
        "(--distributed.connect_timeout_seconds)\n"
    )


def test_what_jax_knows_against_a_cluster_is_the_users_to_mend(monkeypatch) -> None:
    def refuse(**given: object) -> None:
        raise RuntimeError("Pods need a\nheadless service")

    monkeypatch.setattr(jax.distributed, "initialize", refuse)
    with pytest.raises(UserError, match=r"JAX can't join a process of several \(Kubernetes\) \(Pods need a headless"):
        distributed._initialize(Membership(None, None, None, Cluster("Kubernetes")), None, DistributedConfig())


@pytest.mark.parametrize("name", ["connect", "barrier", "heartbeat"])
def test_time_outs_are_whole_seconds(name: str) -> None:
    config = replace(DistributedConfig(), **{f"{name}_timeout_seconds": 0})
    assert list(rules._distributed(config)) == [f"distributed.{name}_timeout_seconds: must be >= 1, got 0"]
