"""launch/multi_process.sh and launch/slurm.sbatch with a false train: what each process gets, signals, exit codes."""

import os
import re
import shlex
import shutil
import signal
from pathlib import Path

import pytest
from launch_machine import FALSE_TOOL, HANG, Machine

DEAF = HANG.replace("exit 75", ":")  # until it is killed
SRUN = FALSE_TOOL + 'while [[ $1 == -* ]]; do shift; done; exec "$@"\n'


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


def by_process(**code: str) -> str:
    """The train of process 0 does p0, that of process 1 p1."""
    return "case $JAX_PROCESS_ID in " + " ".join(f"{name[1:]}) {text} ;;" for name, text in code.items()) + " esac"


def test_each_process_gets_its_number_and_its_output_a_prefix(machine: Machine):
    show = 'for name in ${!JAX_*} XLA_FLAGS; do echo "$name=${!name}"; done; echo error >&2; printf "no newline"'
    flags = ["--processes", "3", "--devices_per_process=2", "--", "--x", "a b"]
    status, output, _ = machine.run("launch/multi_process.sh", *flags, FALSE_TRAIN=show, XLA_FLAGS="--xla_a=1")
    assert status == 0 and machine.calls()[2].endswith("-e .")
    assert machine.calls()[3:] == ["angpt_jax.train --x a b"] * 3
    ports = re.findall(r"JAX_COORDINATOR_ADDRESS=127\.0\.0\.1:(\d+)", output)
    assert len(ports) == 3 and len({*ports}) == 1 and 20000 <= int(ports[0]) < 32768
    for number in range(3):
        lines = [line[4:] for line in output.splitlines() if line.startswith(f"[{number}] ")]
        assert lines == [
            f"JAX_COORDINATOR_ADDRESS=127.0.0.1:{ports[0]}",
            "JAX_NUM_PROCESSES=3",
            f"JAX_PROCESS_ID={number}",
            "XLA_FLAGS=--xla_a=1 --xla_force_host_platform_device_count=2",
            "error",
            "no newline",
        ]


def test_without_devices_per_process_xla_flags_stay_as_they_are(machine: Machine):
    show = 'echo "${XLA_FLAGS-unset} ${JAX_LOCAL_DEVICE_IDS-unset}"'
    assert machine.run("launch/multi_process.sh", FALSE_TRAIN=show)[1].count("unset unset") == 2
    assert machine.run("launch/multi_process.sh", FALSE_TRAIN=show, XLA_FLAGS="--a")[1].count("] --a unset") == 2


def test_gpus_are_shared_out(machine: Machine):
    flags = ["--processes", "2", "--devices_per_process", "4", "--dry_run"]
    lines = machine.run("launch/multi_process.sh", *flags, ANGPT_ACCELERATOR="cuda")[1].splitlines()[1:]
    assert [shlex.split(line)[4] for line in lines] == [f"JAX_LOCAL_DEVICE_IDS={ids}" for ids in ("0,1,2,3", "4,5,6,7")]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize("to_all", [False, True], ids=["to the script", "to the group"])
def test_a_signal_reaches_all_processes(machine: Machine, number: signal.Signals, to_all: bool):
    with machine.start("launch/multi_process.sh", FALSE_TRAIN=HANG) as process:
        machine.wait_until_hanging(times=2)
        (os.killpg if to_all else os.kill)(process.pid, number)
        assert machine.end(process)[0] == 75
    machine.wait_until_gone()


def test_when_one_process_fails_the_others_are_stopped(machine: Machine):
    train = by_process(p0=HANG, p1="until grep -q hanging $CALLS || ((SECONDS > 20)); do sleep 0.02; done; exit 3")
    status, _, errors = machine.run("launch/multi_process.sh", FALSE_TRAIN=train)
    assert status == 3 and [line.split(": ", 1)[1] for line in errors.splitlines()[-2:]] == [
        "process 1 ended with exit code 3",
        "process 0 ended with exit code 75",
    ]
    machine.wait_until_gone()


def test_one_that_does_not_stop_is_killed_after_the_grace_time(machine: Machine):
    train = by_process(p0=DEAF, p1="until grep -q hanging $CALLS || ((SECONDS > 20)); do sleep 0.02; done; exit 1")
    status, _, errors = machine.run("launch/multi_process.sh", "--grace_seconds", "0", FALSE_TRAIN=train)
    assert status == 1 and "process 0 ended with exit code 137" in errors
    machine.wait_until_gone()


@pytest.mark.parametrize("first, second, status", [(0, 0, 0), (75, 75, 75), (75, 1, 1), (0, 4, 4), (2, 2, 2)])
def test_the_exit_code_is_the_first_failure_and_75_if_there_is_none(machine: Machine, first, second, status):
    ready = "until grep -q ready $CALLS || ((SECONDS > 20)); do sleep 0.02; done"
    train = by_process(
        p0=f"{ready}; exit {first}", p1=f"trap : TERM; echo ready >>$CALLS; sleep 0.3; sleep 0.1; exit {second}"
    )
    assert machine.run("launch/multi_process.sh", FALSE_TRAIN=train)[0] == status


def test_a_child_that_keeps_the_output_open_does_not_hold_the_script(machine: Machine):
    status, output, _ = machine.run(
        "launch/multi_process.sh", "--processes", "1", FALSE_TRAIN='sleep 25 & echo "pid $!" >>"$CALLS"; echo end'
    )
    assert status == 0 and output == "[0] end\n"
    os.kill(int(machine.calls()[-1].split()[1]), signal.SIGKILL)


@pytest.fixture
def cluster(machine: Machine) -> Machine:
    machine.tool("srun", SRUN)
    machine.tool("scontrol")
    return machine


def batch(machine: Machine, *flags: str, **environment: str) -> tuple[int, str, str]:
    """As Slurm does: a copy of the script in another folder, called in the folder of sbatch."""
    copy = machine.root / "spool/slurm_script"
    copy.parent.mkdir(exist_ok=True)
    shutil.copy(machine.root / "launch/slurm.sbatch", copy)
    return machine.run(
        "spool/slurm_script", *flags, SLURM_SUBMIT_DIR=str(machine.root), SLURM_JOB_ID="7", **environment
    )


@pytest.mark.parametrize("status", [0, 1, 2, 3, 4])
def test_slurm_installs_for_cuda_and_ends_with_the_exit_code_of_train(cluster: Machine, status: int):
    result = batch(cluster, "--", "--x", "a b", FALSE_TRAIN=f"exit {status}")
    assert result[0] == status
    install, step, train = cluster.calls()[2:]
    assert install.endswith("-e .[cuda]") and train == "angpt_jax.train --x a b"
    assert re.fullmatch(r"srun --label --gpu-bind=none .*/\.venv/bin/python -m angpt_jax\.train --x a b", step)
    assert "--gpus-per-task" not in step  # JAX takes the GPU of the local number: it has to see all


def test_slurm_hands_on_the_cpus_of_a_task(cluster: Machine):
    batch(cluster, SLURM_CPUS_PER_TASK="12")
    assert "--cpus-per-task=12" in cluster.calls()[3]


def test_slurm_puts_a_stopped_job_back_into_the_queue(cluster: Machine):
    status, _, errors = batch(cluster, FALSE_TRAIN="exit 75")
    assert status == 75 and cluster.calls()[-1] == "scontrol requeue 7" and "back into the queue" in errors
    assert batch(cluster, "--requeues", "3", FALSE_TRAIN="exit 75", SLURM_RESTART_COUNT="2")[0] == 75
    assert cluster.calls()[-1] == "scontrol requeue 7"
    status, _, errors = batch(cluster, "--requeues", "3", FALSE_TRAIN="exit 75", SLURM_RESTART_COUNT="3")
    assert status == 75 and cluster.calls()[-1] == "angpt_jax.train" and "after 3 requeues" in errors


def test_slurm_leaves_a_cancelled_job_out_of_the_queue(cluster: Machine):
    status, _, _ = batch(
        cluster, FALSE_TRAIN="kill -TERM $PPID; exit 75"
    )  # srun becomes train: its parent is the script
    assert status == 75 and cluster.calls()[-1] == "angpt_jax.train"


def test_slurm_tells_where_to_submit(cluster: Machine):
    (cluster.root / "launch/lib.sh").unlink()
    status, _, errors = batch(cluster)
    assert status == 2 and errors.endswith("has no lib.sh; call sbatch in the repository root\n")


def test_slurm_asks_for_what_the_script_relies_on():
    text = (Path(__file__).parent.parent / "launch/slurm.sbatch").read_text()
    asked = re.findall(r"^#SBATCH (.*)$", text.split("set -euo")[0], re.MULTILINE)
    assert {"--signal=TERM@120", "--requeue", "--open-mode=append"} <= {*asked}
    sizes = dict(flag.removeprefix("--").split("=") for flag in asked if "=" in flag)
    assert sizes["ntasks-per-node"] == sizes["gpus-per-node"]  # one process per GPU
