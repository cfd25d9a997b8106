"""What all scripts of launch/ with flags of their own have in common: dry runs, refusals, help, shellcheck."""

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from launch_machine import FALSE_TOOL, ROOT, Machine

TPU = "--name a-1 --project p --zone z-1 --type v5litepod-256 --runtime r --run_dir /s/a"
GKE = "--name a-1 --image eu/i:1 --tpu v5e --topology 16x16 --claim c --run_dir /shared/a"
XPK = "--name a-1 --cluster c --project p --zone z-1 --tpu_type v5litepod-256 --image eu/i:1 --run_dir /s/a"
COMMANDS = {
    "tpu_pod.sh": TPU,
    "gke.sh": GKE,
    "xpk.sh": XPK,
    "image.sh": "--platform tpu --tag eu/i:1 --push",
    "slurm.sbatch": "",
    "multi_process.sh": "",
}
TAKES_TRAIN_FLAGS = sorted({*COMMANDS} - {"image.sh"})
OUTSIDE = "gcloud kubectl xpk docker srun sbatch scontrol ssh scp curl nvidia-smi".split()
SHELL_FILES = sorted([*ROOT.glob("launch/*.sh"), ROOT / "launch/slurm.sbatch", ROOT / ".ci/run"])


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    """One where every tool that reaches something outside fails, and leaves a trace."""
    machine = Machine(tmp_path)
    for name in OUTSIDE:
        machine.tool(name, FALSE_TOOL + "exit 99\n")
    return machine


def refused(machine: Machine, script: str, *flags: str, **environment: str) -> list[str]:
    """The lines of a refusal, which touches nothing."""
    before = machine.files()
    status, output, errors = machine.run(f"launch/{script}", *flags, **environment)
    assert (status, output, machine.calls(), machine.files()) == (2, "", [], before), errors
    lines = errors.splitlines()
    assert all(line.startswith(f"launch/{script}: ") for line in lines)
    return [line.removeprefix(f"launch/{script}: ") for line in lines]


@pytest.mark.parametrize("script", SHELL_FILES, ids=lambda path: path.name)
def test_a_script_parses_and_names_no_address(script: Path):
    subprocess.run(["bash", "-n", script], check=True)
    assert not re.search(r"index-url|https?:", script.read_text())


def test_shellcheck_finds_nothing():
    shellcheck = Path(sys.executable).parent / "shellcheck"
    found = subprocess.run([shellcheck, "-x", *SHELL_FILES], cwd=ROOT, capture_output=True, text=True)
    assert (found.returncode, found.stdout) == (0, "")


@pytest.mark.parametrize("script", COMMANDS)
def test_a_dry_run_prints_shell_and_touches_nothing(machine: Machine, script: str):
    before = machine.files()
    train = ["--", "--x", "it's a $b"] if script in TAKES_TRAIN_FLAGS else []
    status, output, errors = machine.run(f"launch/{script}", *COMMANDS[script].split(), "--dry_run", *train)
    assert (status, errors, machine.calls(), machine.files()) == (0, "", [], before)
    subprocess.run(["bash", "-n"], input=output, text=True, check=True)
    if script == "gke.sh":
        assert yaml.safe_load("\n".join(output.splitlines()[1:-1]))["kind"] == "JobSet" and '"it\'s a $b"' in output
    elif script in TAKES_TRAIN_FLAGS:
        words = shlex.split(output, comments=True)
        inner = [word.removeprefix("--command=") for word in words if word.startswith("--command=")]
        assert "it's a $b" in [*words, *shlex.split(" ".join(inner))]


@pytest.mark.parametrize("script", COMMANDS)
@pytest.mark.parametrize("switch", [["--dry_run", "true"], ["--dry_run=true"]])
def test_a_switch_may_have_a_value(machine: Machine, script: str, switch: list[str]):
    status, output, _ = machine.run(f"launch/{script}", *switch, *COMMANDS[script].split())
    assert status == 0 and output and machine.calls() == []


@pytest.mark.parametrize("script", COMMANDS)
def test_help_shows_every_flag_and_runs_nothing(machine: Machine, script: str):
    status, output, errors = machine.run(f"launch/{script}", "--help")
    assert (status, errors, machine.calls()) == (0, "", [])
    assert output.startswith(f"bash launch/{script} FLAGS") and "--dry_run" in output
    assert {word for word in COMMANDS[script].split() if word.startswith("--")} <= set(output.split())


@pytest.mark.parametrize("script", ["tpu_pod.sh", "gke.sh", "xpk.sh", "image.sh"])
def test_each_missing_flag_is_one_line(machine: Machine, script: str):
    words = COMMANDS[script].split()
    required = [word for word in words if word.startswith("--") and word != "--push"]
    lines = refused(machine, script)
    assert sorted(line.split(":")[0] for line in lines) == sorted(required)
    assert all(re.fullmatch(r"--\w+: is required; .+", line) for line in lines)
    for flag in required:
        where = words.index(flag)
        assert [line.split(":")[0] for line in refused(machine, script, *words[:where], *words[where + 2 :])] == [flag]


@pytest.mark.parametrize("script", COMMANDS)
@pytest.mark.parametrize(
    "flags, message",
    [
        ("--zome=x", "--zome: is not a flag; flags are --"),
        ("--zome x", "--zome: is not a flag; flags are --"),
        ("--A[$(id)] x", "--A[$(id)]: is not a flag; flags are --"),
        ("word", "'word': is not a flag; flags begin with --"),
        ("--dry_run=yes", "--dry_run: must be true or false, got 'yes'"),
    ],
)
def test_a_bad_flag_is_one_line(machine: Machine, script: str, flags: str, message: str):
    (line,) = refused(machine, script, *COMMANDS[script].split(), *flags.split(), SLURM_JOB_ID="1")
    assert line.startswith(message)


@pytest.mark.parametrize(
    "script, flags, message",
    [
        ("tpu_pod.sh", "--name", "--name: needs a value; "),
        ("tpu_pod.sh", "--name=", "--name: must not be empty; "),
        ("tpu_pod.sh", "--name A", "--name: must be at most 40 lower case letters"),
        ("tpu_pod.sh", "--type v5e", "--type: must be an accelerator type, as v5litepod-256, got 'v5e'"),
        ("tpu_pod.sh", "--retries 1.5", "--retries: must be a whole number, got '1.5'"),
        ("tpu_pod.sh", "--retries 08", "--retries: must be a whole number, got '08'"),
        ("tpu_pod.sh", "--node_count 0", "--node_count: must be 1 or more, got '0'"),
        ("tpu_pod.sh", "--run_dir gs://b/a", "--run_dir: must be an absolute path on storage that all hosts mount"),
        ("tpu_pod.sh", "-- --run.dir /x", "--run.dir: is set by --run_dir"),
        ("tpu_pod.sh", "-- --run.dir=/x", "--run.dir: is set by --run_dir"),
        ("gke.sh", "--run_dir runs/a", "--run_dir: must be an absolute path on storage that all hosts mount"),
        ("gke.sh", "--run_dir /other/a", "--run_dir: must be a path below --mount /shared, got '/other/a'"),
        ("gke.sh", "--tpu v9", "--tpu: must be v4, v5e, v5p or v6e, got 'v9'"),
        ("gke.sh", "--topology 256", "--topology: must be chips by direction, as 16x16, got '256'"),
        ("gke.sh", "--topology 3x3", "--chips_per_host: must divide the 9 chips of --topology 3x3, got 4"),
        ("gke.sh", "--image=a:{b", "--image: must be the name of an image, got 'a:{b'"),
        ("gke.sh", "--claim=[]", "--claim: must be the name of a PersistentVolumeClaim, got '[]'"),
        ("xpk.sh", "--num_slices 0", "--num_slices: must be 1 or more, got '0'"),
        ("image.sh", "--platform cpu", "--platform: must be cuda or tpu, got 'cpu'"),
        ("image.sh", "-- --x", "--: an image takes no flags of train"),
        ("multi_process.sh", "--processes 0", "--processes: must be 1 or more, got '0'"),
        ("multi_process.sh", "--devices_per_process two", "--devices_per_process: must be a whole number, got 'two'"),
        ("slurm.sbatch", "", "SLURM_JOB_ID: is not set; use sbatch, or --dry_run"),
    ],
)
def test_a_bad_value_is_one_line(machine: Machine, script: str, flags: str, message: str):
    (line,) = refused(machine, script, *COMMANDS[script].split(), *flags.split())
    assert line.startswith(message)


@pytest.mark.parametrize("script", ["tpu_pod.sh", "gke.sh", "xpk.sh"])
def test_train_flags_for_other_hosts_are_printable(machine: Machine, script: str):
    (line,) = refused(machine, script, *COMMANDS[script].split(), "--", "--x", "a\nb")
    assert line == "$'a\\nb': has a control character, which train's flags must not have here"


def test_all_problems_are_told_at_once(machine: Machine):
    lines = refused(machine, "tpu_pod.sh", *TPU.split(), "--zome", "x", "--retries", "many", "--run_dir", "here")
    assert [line.split(":")[0] for line in lines] == ["--zome", "--retries", "--run_dir"]


def test_what_is_printed_reads_back_as_the_same_words(machine: Machine):
    words = ["a b", "it's", '"', "$x `y`", "\\", "*", "", "--z=1,2"]
    output = machine.run("launch/multi_process.sh", "--dry_run", "--processes", "1", "--", *words)[1]
    assert shlex.split(output.splitlines()[-1])[-len(words) :] == words


def commands_of_the_readme() -> list[list[str]]:
    """Words of the commands in indented lines, from the script on, for scripts with flags of their own."""
    text = (ROOT / "launch/README.md").read_text().replace("\\\n", " ")
    lines = [line for line in text.splitlines() if re.match(r" {4,}(bash|sbatch) .*launch/", line)]
    words = [shlex.split(line, comments=True) for line in lines]
    found = [line[next(i for i, word in enumerate(line) if word.startswith("launch/")) :] for line in words]
    return [line for line in found if line[0].removeprefix("launch/") in COMMANDS]


@pytest.mark.parametrize("words", commands_of_the_readme(), ids=" ".join)
def test_a_command_of_the_readme_is_accepted(machine: Machine, words: list[str]):
    status, output, errors = machine.run(words[0], "--dry_run", *words[1:])
    assert (status, errors, machine.calls()) == (0, "", []) and output


def test_the_readme_has_a_command_and_a_section_for_every_script():
    assert {words[0].removeprefix("launch/") for words in commands_of_the_readme()} == {*COMMANDS}
    text = (ROOT / "launch/README.md").read_text()
    titles = {re.sub(r"[^\w -]", "", title).lower().replace(" ", "-") for title in re.findall(r"^## (.*)", text, re.M)}
    assert {*re.findall(r"\]\(#([\w-]+)\)", text)} <= titles
