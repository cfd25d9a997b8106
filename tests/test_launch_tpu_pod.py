"""launch/tpu_pod.sh with a false gcloud: the order of calls, preemption, signals, deletion in any case."""

import os
import shlex
import signal
import tarfile
from pathlib import Path

import pytest
from launch_machine import FALSE_TOOL, Machine, wait_for

FLAGS = "--name a-1 --project p --zone z-1 --type v5litepod-256 --runtime r-1 --run_dir /s/a --poll_seconds 0".split()
GCLOUD = (
    FALSE_TOOL
    + r"""
case "$*" in
  *' describe '*) answer state ;;
  *' create '*) hold=$(answer create_holds) && [[ -z $hold ]] || { echo hanging >>"$CALLS" && sleep 1; }
    exit "$(answer create)" ;;
  *' delete '*) exit "$(answer delete)" ;;
  *' scp '*) cp "$5" "$ANSWERS/copied" && exit "$(answer scp)" ;;
  *'worker.sh install'*) exit "$(answer install)" ;;
  *'worker.sh stop'*) echo >"$ANSWERS/asked" ;;
  *'worker.sh train'*) status=$(answer train)
    [[ $status == hang* ]] || exit "$status"
    echo "pid $$" >>"$CALLS" && echo hanging >>"$CALLS"
    until [[ $status == hang && -e $ANSWERS/asked ]] || ((SECONDS > 20)); do sleep 0.02; done
    exit 75 ;;
esac
"""
)
LIFE = ["create", "state", "scp", "install", "train"]  # of a queued resource, without its end


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    machine = Machine(tmp_path)
    machine.tool("gcloud", GCLOUD)
    machine.answer(create="0", state="ACTIVE", scp="0", install="0", train="0", delete="0")
    for name in ("angpt_jax", "configs"):
        (machine.root / name).mkdir()
        (machine.root / name / "file").touch()
    return machine


def verbs(machine: Machine) -> list[str]:
    """The calls of gcloud in their order, each as one word."""
    words = []
    for call in machine.calls():
        if call.startswith("gcloud "):
            verb = call.split()[4]
            what = call.split("worker.sh ")[-1].split()[0] if verb == "ssh" else verb
            words.append({"describe": "state"}.get(what, what))
    return words


def test_it_creates_waits_installs_trains_and_deletes(machine: Machine):
    machine.answer(state="WAITING_FOR_RESOURCES PROVISIONING ACTIVE")
    status, _, errors = machine.run("launch/tpu_pod.sh", *FLAGS, "--", "--config", "a b")
    assert status == 0 and "a-1 is PROVISIONING" in errors
    assert verbs(machine) == ["create", "state", "state", "state", "scp", "install", "train", "delete"]
    with tarfile.open(machine.answers / "copied") as archive:
        names = archive.getnames()
    assert {"angpt_jax/file", "configs/file", "launch/worker.sh", "pyproject.toml", "constraints.txt"} <= {*names}
    assert not [*machine.root.glob("build/*")]


def test_the_dry_run_prints_what_is_called(machine: Machine):
    extra = "--spot --node_count 2 --setup=mount --create_flag=--x=1 --create_flag=--y --ssh_flag=--t".split()
    printed = machine.run("launch/tpu_pod.sh", *FLAGS, *extra, "--dry_run", "--", "--x", "a  b")[1]
    assert machine.run("launch/tpu_pod.sh", *FLAGS, *extra, "--", "--x", "a  b")[0] == 0
    lines = [" ".join(shlex.split(line)) for line in printed.splitlines()]
    assert [line for line in lines if line.startswith("gcloud ")] == machine.calls()
    create, _, scp, install, train, delete = machine.calls()
    assert (
        create.endswith("--x=1 --y --node-count=2 --spot --project=p --zone=z-1 --quiet") and "--node-id" not in create
    )
    assert "--command=mount && mkdir -p angpt && tar -xzf a-1.tar.gz -C angpt && bash angpt/launch" in install
    assert "--command=bash angpt/launch/worker.sh train --run.dir /s/a --x 'a  b' --project" in train
    assert all("--worker=all --node=all --batch-size=all --t" in call for call in (scp, install, train))
    assert "delete a-1 --force" in delete


@pytest.mark.parametrize("state", ["SUSPENDED", "SUSPENDING", "FAILED"])
def test_a_preemption_makes_it_anew_and_trains_on_in_the_same_run_directory(machine: Machine, state: str):
    machine.answer(train="255 0", state=f"ACTIVE {state} ACTIVE")
    status, _, errors = machine.run("launch/tpu_pod.sh", *FLAGS)
    assert status == 0 and "retry 1 of 5" in errors
    assert verbs(machine) == [*LIFE, "state", "delete", *LIFE, "delete"]
    trains = [call for call in machine.calls() if "worker.sh train" in call]
    assert len(trains) == 2 and len({*trains}) == 1 and "--run.dir /s/a" in trains[0]


def test_exit_code_75_makes_it_anew(machine: Machine):
    machine.answer(train="75 75 0")
    assert machine.run("launch/tpu_pod.sh", *FLAGS)[0] == 0
    assert verbs(machine) == [*LIFE, "delete"] * 3


def test_the_number_of_retries_is_bounded(machine: Machine):
    machine.answer(train="75")
    status, _, errors = machine.run("launch/tpu_pod.sh", *FLAGS, "--retries", "2")
    assert status == 75 and "gave up after 2 retries" in errors
    assert verbs(machine) == [*LIFE, "delete"] * 3


def test_one_that_never_becomes_active_is_made_anew(machine: Machine):
    machine.answer(state="PROVISIONING FAILED ACTIVE")
    assert machine.run("launch/tpu_pod.sh", *FLAGS)[0] == 0
    assert verbs(machine) == ["create", "state", "state", "delete", *LIFE, "delete"]


@pytest.mark.parametrize("status", [1, 2, 3, 4, 139])
def test_another_exit_code_ends_it_and_deletes(machine: Machine, status: int):
    machine.answer(train=str(status))
    assert machine.run("launch/tpu_pod.sh", *FLAGS)[0] == status
    looks = [] if status in (2, 3, 4) else ["state", "state"]  # was it lost? the state lags behind
    assert verbs(machine) == [*LIFE, *looks, "delete"]


def test_after_a_broken_connection_it_follows_the_training_that_goes_on(machine: Machine):
    machine.answer(train="255 0")
    assert machine.run("launch/tpu_pod.sh", *FLAGS)[0] == 0
    assert verbs(machine) == [*LIFE, "state", "state", "train", "delete"]


def test_a_gcloud_that_fails_for_a_while_is_not_a_loss(machine: Machine):
    machine.tool(
        "gcloud", GCLOUD.replace("answer state ;;", "state=$(answer state); echo ${state#-}; [[ -n ${state#-} ]] ;;")
    )
    machine.answer(train="255 0", state="ACTIVE - - ACTIVE")
    assert machine.run("launch/tpu_pod.sh", *FLAGS)[0] == 0
    assert verbs(machine).count("create") == 1
    machine.answer(train="255 0", state="ACTIVE -")
    status, _, errors = machine.run("launch/tpu_pod.sh", *FLAGS)
    assert status == 1 and "does not tell the state" in errors and verbs(machine)[-1] == "delete"


@pytest.mark.parametrize("step", ["scp", "install"])
def test_a_failed_installation_ends_it_and_deletes_unless_it_was_lost(machine: Machine, step: str):
    machine.answer(**{step: "1"})
    status, _, errors = machine.run("launch/tpu_pod.sh", *FLAGS)
    assert status == 1 and "the installation on the workers failed" in errors and verbs(machine)[-1] == "delete"
    assert "train" not in verbs(machine)
    machine.answer(**{step: "1 0"}, state="ACTIVE SUSPENDED ACTIVE")
    assert machine.run("launch/tpu_pod.sh", *FLAGS)[0] == 0
    assert verbs(machine)[-6:] == [*LIFE, "delete"]


def test_what_it_did_not_create_it_does_not_delete(machine: Machine):
    machine.answer(create="1")
    status, _, errors = machine.run("launch/tpu_pod.sh", *FLAGS)
    assert status == 1 and "could not create a-1" in errors and verbs(machine) == ["create"]


def test_a_failed_deletion_is_told(machine: Machine):
    machine.answer(delete="1")
    status, _, errors = machine.run("launch/tpu_pod.sh", *FLAGS)
    assert status == 1 and errors.endswith("queued-resources delete a-1 --force --project=p --zone=z-1 --quiet\n")
    assert verbs(machine) == [*LIFE, *["delete"] * 3]
    machine.answer(delete="1 1 0")
    assert machine.run("launch/tpu_pod.sh", *FLAGS)[0] == 0


def test_keep_uses_one_that_is_there_and_leaves_it(machine: Machine):
    assert machine.run("launch/tpu_pod.sh", *FLAGS, "--keep")[0] == 0
    assert verbs(machine) == ["state", "state", "scp", "install", "train"]
    machine.answer(state="SUSPENDED SUSPENDED ACTIVE", train="3")  # there, but lost
    assert machine.run("launch/tpu_pod.sh", *FLAGS, "--keep")[0] == 3
    assert verbs(machine)[:3] == ["state", "state", "delete"] and verbs(machine)[-1] == "train"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_signal_stops_the_training_with_a_checkpoint_then_deletes(machine: Machine, number: signal.Signals):
    machine.answer(train="hang")
    with machine.start("launch/tpu_pod.sh", *FLAGS) as process:
        machine.wait_until_hanging()
        os.killpg(process.pid, number)  # to the whole group, as a terminal does: the connection has to live on
        assert machine.end(process)[0] == 75
    assert verbs(machine) == [*LIFE, "stop", "delete"]
    machine.wait_until_gone()


def test_a_second_signal_deletes_at_once(machine: Machine):
    machine.answer(train="hang_on")
    with machine.start("launch/tpu_pod.sh", *FLAGS) as process:
        machine.wait_until_hanging()
        process.send_signal(signal.SIGTERM)
        wait_for(lambda: (machine.answers / "asked").exists())
        process.send_signal(signal.SIGTERM)
        assert machine.end(process)[0] == 75
    assert verbs(machine) == [*LIFE, "stop", "delete"]
    machine.wait_until_gone()


def test_a_signal_while_it_waits_deletes_at_once(machine: Machine):
    machine.answer(state="PROVISIONING")
    with machine.start("launch/tpu_pod.sh", *FLAGS, "--poll_seconds", "500") as process:
        wait_for(lambda: "state" in verbs(machine))
        process.send_signal(signal.SIGTERM)
        assert machine.end(process)[0] == 75
    assert verbs(machine) == ["create", "state", "delete"]


def test_a_signal_during_the_creation_waits_for_it_then_deletes(machine: Machine):
    machine.answer(create_holds="yes")
    with machine.start("launch/tpu_pod.sh", *FLAGS) as process:
        machine.wait_until_hanging()
        process.send_signal(signal.SIGTERM)
        assert machine.end(process)[0] == 75
    assert verbs(machine) == ["create", "delete"]
