"""launch/xpk.sh, launch/image.sh and the Dockerfiles."""

import fnmatch
import json
import re
import shlex
import tomllib
from pathlib import Path

import pytest
from launch_machine import FALSE_TOOL, ROOT, Machine

XPK = "--name a-1 --cluster c --project p --zone z-1 --tpu_type v5litepod-256 --image eu/i:1 --run_dir /s/a".split()
DOCKERFILES = ["Dockerfile.cuda", "Dockerfile.tpu"]


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    machine = Machine(tmp_path)
    for name in ("xpk", "docker"):
        machine.tool(name, FALSE_TOOL + 'exit "$(answer ${0##*/})"\n')
    return machine


@pytest.mark.parametrize("status", [0, 1])
def test_xpk_calls_what_the_dry_run_shows(machine: Machine, status: int):
    machine.answer(xpk=str(status))
    flags = [*XPK, *"--num_slices 2 --storage s1 --storage s2 --xpk_flag=--priority=high --restarts 3".split()]
    shown = machine.run("launch/xpk.sh", *flags, "--dry_run", "--", "--x", "a b")[1]
    assert machine.run("launch/xpk.sh", *flags, "--", "--x", "a b")[0] == status
    words = shlex.split(shown)
    assert machine.calls() == [" ".join(words)] and words[:3] == ["xpk", "workload", "create"]
    assert words[-1] == "--command=exec python -m angpt_jax.train --run.dir /s/a --x 'a b'"
    given = "--workload=a-1 --cluster=c --project=p --zone=z-1 --tpu-type=v5litepod-256 --docker-image=eu/i:1".split()
    given += "--num-slices=2 --storage=s1 --storage=s2 --priority=high --max-restarts=3".split()
    assert {*given, "--restart-on-exit-codes=1,75", "--termination-grace-period-seconds=300"} == {*words[3:-1]}


def test_an_image_is_built_then_pushed(machine: Machine):
    machine.answer(docker="0")
    assert machine.run("launch/image.sh", "--platform", "tpu", "--tag", "eu/i:1", "--user", "root", "--push")[0] == 0
    build, push = machine.calls()
    file = f"{machine.root}/launch/Dockerfile.tpu"
    assert build == f"docker build --file {file} --build-arg RUN_AS=root --tag eu/i:1 {machine.root}"
    assert push == "docker push eu/i:1"
    assert machine.run("launch/image.sh", "--platform", "cuda", "--tag", "i")[0] == 0 and len(machine.calls()) == 1
    machine.answer(docker="1")
    assert machine.run("launch/image.sh", "--platform", "cuda", "--tag", "i", "--push")[0] == 1
    assert len(machine.calls()) == 1  # what was not built is not pushed


def instructions(name: str) -> list[tuple[str, str]]:
    text = re.sub(r"^#.*\n|\\\n", "", (ROOT / "launch" / name).read_text(), flags=re.MULTILINE)
    return [(line.split()[0], line.split(maxsplit=1)[1]) for line in text.splitlines() if line.strip()]


@pytest.mark.parametrize("name", DOCKERFILES)
def test_a_dockerfile_fits_the_project(name: str):
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    lines = instructions(name)
    assert {verb for verb, _ in lines} <= {"FROM", "ENV", "WORKDIR", "COPY", "RUN", "ARG", "USER", "ENTRYPOINT"}
    (base,) = [rest for verb, rest in lines if verb == "FROM"]
    version = re.fullmatch(r"python:3\.(\d+)-slim", base)
    lowest = re.fullmatch(r">=3\.(\d+)", project["requires-python"])
    assert version and lowest and int(version[1]) >= int(lowest[1])
    (install,) = [rest for verb, rest in lines if "pip install" in rest]
    assert install.endswith(f"pip install -c constraints.txt -e '.[{name.split('.')[1]}]'")
    assert name.split(".")[1] in project["optional-dependencies"]
    assert json.loads(lines[-1][1]) == ["python", "-m", "angpt_jax.train"] and lines[-1][0] == "ENTRYPOINT"


@pytest.mark.parametrize("name", DOCKERFILES)
def test_a_dockerfile_copies_what_is_there_and_the_code_after_the_dependencies(name: str):
    ignore = [line for line in (ROOT / ".dockerignore").read_text().splitlines() if line and not line.startswith("#")]
    sent = [line[1:] for line in ignore if line.startswith("!")]
    lines = instructions(name)
    sources = [word for verb, rest in lines if verb == "COPY" for word in rest.split()[:-1]]
    assert all((ROOT / source).exists() for source in sources) and sorted(sources) == sorted(sent)
    assert ignore[0] == "*" and any(fnmatch.fnmatch("angpt_jax/__pycache__", line) for line in ignore[1:])
    where = next(i for i, (_, rest) in enumerate(lines) if "pip install" in rest)
    early = [word for verb, rest in lines[:where] if verb == "COPY" for word in rest.split()[:-1]]
    assert early == ["pyproject.toml", "constraints.txt"]  # so that a change of the code installs nothing anew


@pytest.mark.parametrize("name", DOCKERFILES)
def test_a_dockerfile_does_not_run_as_root_by_default(name: str):
    lines = instructions(name)
    assert [rest for verb, rest in lines if verb == "USER"] == ["${RUN_AS}"]
    assert ("ARG", "RUN_AS=angpt") in lines and any("useradd" in rest and "angpt" in rest for _, rest in lines)
    last_run = max(i for i, (verb, _) in enumerate(lines) if verb == "RUN")
    assert lines.index(("USER", "${RUN_AS}")) > last_run
