"""launch/worker.sh, which tpu_pod.sh has the workers run, with a false train."""

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from subprocess import Popen

import pytest
from launch_machine import FALSE_PYTHON, FALSE_TOOL, HANG, Machine


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


@contextmanager
def training(machine: Machine) -> Iterator[Popen[str]]:
    """A train on a worker, which is ended in any case."""
    assert machine.run("launch/worker.sh", "install")[0] == 0
    with machine.start("launch/worker.sh", "train", "--x", "a b", FALSE_TRAIN=f"echo first; {HANG}") as process:
        try:
            machine.wait_until_hanging()
            yield process
        finally:
            pid = machine.root / "runs/worker/shell"
            if pid.exists() and Path(f"/proc/{pid.read_text().strip()}").exists():
                os.killpg(int(pid.read_text()), signal.SIGKILL)


def worker(machine: Machine, *words: str) -> None:
    """Another call on the worker, beside one that runs: start() would clear the calls."""
    before = machine.calls_file.read_text()
    assert machine.run("launch/worker.sh", *words)[0] == 0
    machine.calls_file.write_text(before + machine.calls_file.read_text())


def test_a_worker_installs_for_tpu_trains_and_gives_the_exit_code(machine: Machine):
    assert machine.run("launch/worker.sh", "install")[0] == 0
    assert machine.calls()[-1].endswith("-e .[tpu]")
    for status in (0, 75):
        assert machine.run("launch/worker.sh", "install")[0] == 0  # makes room for another train
        result = machine.run(
            "launch/worker.sh", "train", "--x", "a b", FALSE_TRAIN=f"echo out; echo err >&2; exit {status}"
        )
        assert result[0] == status and machine.calls() == ["angpt_jax.train --x a b"]
        assert [line.split("] ")[1] for line in result[1].splitlines()] == ["out", "err"]


def test_a_worker_stops_train_with_its_checkpoint(machine: Machine):
    with training(machine) as process:
        worker(machine, "stop")
        status, output, _ = machine.end(process)
    assert status == 75 and [line.split("] ")[1] for line in output.splitlines()] == ["first", "stopped"]
    machine.wait_until_gone()


def test_train_outlives_its_connection_and_a_second_call_follows_it(machine: Machine):
    with training(machine) as process:
        os.killpg(process.pid, signal.SIGKILL)
        before = machine.calls_file.read_text()
        with machine.start("launch/worker.sh", "train", "--x", "a b") as second:
            machine.calls_file.write_text(before)
            assert second.stdout and second.stdout.readline().endswith("] first\n")
            worker(machine, "stop")
            assert machine.end(second)[0] == 75
    assert machine.calls().count("hanging") == 1 and machine.modules().count("angpt_jax.train") == 1


def test_a_worker_with_a_running_train_is_not_installed_again(machine: Machine):
    with training(machine):
        status, _, errors = machine.run("launch/worker.sh", "install")
        assert status == 2 and "train runs here already" in errors


def test_a_worker_with_an_old_python_gets_a_newer_one(machine: Machine):
    machine.tool("python3", FALSE_PYTHON.replace(":-3.11.9", ":-3.9.2"))
    machine.tool("sudo", FALSE_TOOL + '[[ "$*" != *python3.11-venv ]] || cp "$NEW" "${0%/*}/python3.11"\n')
    new = machine.answers / "new"
    new.write_text(FALSE_PYTHON)
    new.chmod(0o755)
    assert machine.run("launch/worker.sh", "install", NEW=str(new))[0] == 0
    assert machine.calls()[0] == "sudo apt-get update -qq" and machine.calls()[-1].endswith("-e .[tpu]")
