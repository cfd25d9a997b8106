"""launch/local.sh and launch/test.sh with a false Python that writes down what it is called with."""

import os
import re
import signal
import subprocess
import tomllib
from pathlib import Path

import pytest
from launch_machine import FALSE_PYTHON, ROOT, Machine

SCRIPTS = ["launch/lib.sh", "launch/local.sh", "launch/test.sh", ".ci/run"]


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


@pytest.mark.parametrize("script", SCRIPTS)
def test_script_parses_and_names_no_index(script: str):
    subprocess.run(["bash", "-n", ROOT / script], check=True)
    assert not re.search(r"index-url|https?:", (ROOT / script).read_text())


def test_constraints_pin_each_dependency_and_name_no_address():
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pins = [line for line in lines if not line.startswith("#")]
    assert all(re.fullmatch(r"[\w.-]+==[\w.]+( ; .+)?", pin) for pin in pins)
    pinned = {pin.split("==")[0].lower().replace("_", "-") for pin in pins}
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    needed = [*project["dependencies"], *project["optional-dependencies"]["test"]]
    assert {re.split(r"[\[<>=;! ]", need)[0].lower().replace("_", "-") for need in needed} <= pinned


def test_local_installs_then_trains_then_samples(machine: Machine):
    assert machine.run("launch/local.sh", "--optim.peak_lr", "2e-3", "--x=a b")[0] == 0
    venv, ensurepip, install, train, sample = machine.calls()
    assert venv.startswith("venv") and venv.endswith("/a copy/.venv") and ensurepip.startswith("ensurepip")
    assert install.startswith("pip install") and install.endswith("-c constraints.txt -e .")
    assert train == "angpt_jax.train --optim.peak_lr 2e-3 --x=a b"
    assert sample == "angpt_jax.sample --run.dir runs/default"


def test_what_is_up_to_date_is_reused_and_extras_add_up(machine: Machine):
    checks, commands = ["ruff", "ruff", "pyright", "pytest"], ["angpt_jax.train", "angpt_jax.sample"]
    machine.run("launch/local.sh")
    machine.run("launch/local.sh")
    assert machine.modules() == commands
    machine.run("launch/test.sh")
    assert machine.calls()[0].endswith("-e .[test]") and machine.modules() == ["pip", *checks]
    assert machine.stamps() == ["base", "test"]
    machine.run("launch/test.sh")
    assert machine.modules() == checks
    machine.run("launch/local.sh")
    assert machine.modules() == commands


@pytest.mark.parametrize("name", ["pyproject.toml", "constraints.txt"])
def test_a_changed_file_installs_again_into_the_same_venv(machine: Machine, name: str):
    machine.run("launch/test.sh")
    with (machine.root / name).open("a") as file:
        file.write("# changed\n")
    machine.run("launch/local.sh")
    assert machine.modules()[0] == "pip" and machine.stamps() == ["base"]  # test is no longer up to date


def test_a_moved_folder_gets_a_new_venv(machine: Machine):
    machine.run("launch/local.sh")
    machine.root = machine.root.rename(machine.root.with_name("moved"))
    machine.run("launch/local.sh")
    assert machine.modules()[:3] == ["venv", "ensurepip", "pip"]


def test_a_failed_installation_stops_and_leaves_no_stamp(machine: Machine):
    status, _, errors = machine.run("launch/test.sh", FALSE_FAIL="pip", FALSE_STATUS="1")
    assert status == 1 and "the installation failed" in errors
    assert machine.stamps() == [] and machine.modules() == ["venv", "ensurepip", "pip"]
    machine.run("launch/local.sh")
    assert machine.modules()[0] == "pip" and machine.stamps() == ["base"]
    machine.run("launch/test.sh", FALSE_FAIL="pip", FALSE_STATUS="1")
    assert machine.stamps() == []  # pip may have taken the package itself out before it failed


@pytest.mark.parametrize("at, again", [("pip", ["pip"]), ("ensurepip", ["venv", "ensurepip", "pip"])])
def test_a_killed_installation_leaves_no_stamp(machine: Machine, at: str, again: list[str]):
    with machine.start("launch/local.sh", FALSE_HANG=at) as process:
        machine.wait_until_hanging()
        os.killpg(process.pid, signal.SIGKILL)
    assert machine.stamps() == []
    machine.run("launch/local.sh")
    assert machine.modules()[:-2] == again


@pytest.mark.parametrize(
    "flags, folder",
    [
        ("--config gpt_plus", "runs/gpt_plus"),
        ("--config a --config=/x/b.c.yaml --run.seed 1", "runs/b.c"),
        ("--config=../a.yml", "runs/a"),
        ("--run.dir /x/y --config a", "/x/y"),
        ("--config a --run.dir=old --run.dir new", "new"),
        ("--dry_run false", "runs/default"),
        ("--dry_run true", None),
        ("--config a --dry_run=true", None),
        ("--help", None),
    ],
)
def test_sample_gets_the_run_directory_of_train(machine: Machine, flags: str, folder: str | None):
    assert machine.run("launch/local.sh", *flags.split())[0] == 0
    samples = [] if folder is None else [f"angpt_jax.sample --run.dir {folder}"]
    assert machine.calls()[3:] == [f"angpt_jax.train {flags}", *samples]


@pytest.mark.parametrize("command, status", [("train", 2), ("train", 75), ("sample", 4)])
def test_exit_codes_are_passed_on(machine: Machine, command: str, status: int):
    name = f"angpt_jax.{command}"
    assert machine.run("launch/local.sh", FALSE_FAIL=name, FALSE_STATUS=str(status))[0] == status
    assert machine.modules()[-1] == name


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_stop_request_reaches_train(machine: Machine, number: signal.Signals):
    with machine.start("launch/local.sh", FALSE_HANG="angpt_jax.train") as process:
        try:
            machine.wait_until_hanging()
            process.send_signal(number)  # to the script alone, as `kill` and containers do
            assert process.wait(timeout=30) == 75
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
    assert "angpt_jax.sample" not in machine.modules()


@pytest.mark.parametrize(
    "environment, message",
    [
        ({}, "needs Python 3.11 or newer with the venv module: none on the PATH"),
        ({"FALSE_VERSION": "3.9.2"}, "needs Python 3.11 or newer with the venv module: python3 is 3.9.2"),
        ({"FALSE_VENV_STATUS": "1"}, "python3 is 3.11.9 but lacks the venv module"),
    ],
)
@pytest.mark.parametrize("script", ["launch/local.sh", "launch/test.sh"])
def test_without_a_usable_python_one_line_and_exit_code_2(machine, script, environment, message):
    if not environment:
        (machine.tools / "python3").unlink()
    status, output, errors = machine.run(script, **environment)
    assert (status, output) == (2, "") and len(errors.splitlines()) == 1 and message in errors
    assert not (machine.root / ".venv").exists()


def test_a_newer_python_is_found_beside_an_old_one(machine: Machine):
    machine.tool("python3", FALSE_PYTHON.replace(":-3.11.9", ":-3.9.2"))
    machine.tool("python3.12", FALSE_PYTHON)
    assert "making .venv with python3.12" in machine.run("launch/local.sh")[2]


@pytest.mark.parametrize("accelerator", ["cuda", "tpu"])
def test_the_accelerator_picks_the_extra(machine: Machine, accelerator: str):
    machine.run("launch/local.sh", ANGPT_ACCELERATOR=accelerator)
    assert machine.calls()[2].endswith(f"-e .[{accelerator}]")


def test_a_gpu_is_found_by_nvidia_smi(machine: Machine):
    machine.tool("nvidia-smi", "#!/usr/bin/env bash\necho 'GPU 0: NVIDIA H200 (UUID: GPU-0)'\n")
    output = machine.run("launch/test.sh", ANGPT_ACCELERATOR="")[1]
    assert machine.calls()[2].endswith("-e .[test,cuda]") and "GPU tests" not in output


def test_an_unknown_accelerator_is_refused(machine: Machine):
    status, _, errors = machine.run("launch/local.sh", ANGPT_ACCELERATOR="gpu")
    assert status == 2 and "ANGPT_ACCELERATOR=gpu: must be cpu, cuda or tpu" in errors and machine.calls() == []


def test_every_check_runs_and_the_pytest_summary_is_last(machine: Machine):
    status, output, _ = machine.run(".ci/run")
    assert status == 0 and output.splitlines()[-1] == "3 passed in 0.01s"
    assert "not run here: GPU tests (no NVIDIA GPU)" in output.splitlines()
    assert machine.calls()[3:] == ["ruff check .", "ruff format --check .", "pyright", "pytest -n 2"]
    machine.run("launch/test.sh", "-k", "a or b")
    assert machine.calls()[-1] == "pytest -n 2 -k a or b"


@pytest.mark.parametrize("check, status", [("ruff check", 1), ("ruff format", 1), ("pyright", 1), ("pytest", 5)])
def test_each_check_can_fail_the_run_and_stops_no_other(machine: Machine, check: str, status: int):
    result, _, errors = machine.run("launch/test.sh", FALSE_FAIL=check, FALSE_STATUS=str(status))
    assert result == 1 and errors.endswith(f"failed: {check}\n") and machine.modules()[-1] == "pytest"


def test_the_tpu_compiler_is_installed_on_request_where_pod_tests_are(machine: Machine):
    (machine.root / "tests").mkdir()
    (machine.root / "tests/test_compile_pods.py").touch()
    assert "pod tests (set ANGPT_TPU_COMPILER=1)" in machine.run("launch/test.sh")[1]
    assert "pod tests" not in machine.run("launch/test.sh", ANGPT_TPU_COMPILER="1")[1]
    assert machine.calls()[0].endswith("-e .[test,tpu]") and machine.stamps() == ["base", "test", "tpu"]
