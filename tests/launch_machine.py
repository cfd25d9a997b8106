"""A machine for the tests of launch/: false tools write down what they are called with, nothing is installed."""

import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).parent.parent
COPIED = ["launch", ".ci", "pyproject.toml", "constraints.txt", "README.md"]
TOOLS = "bash basename cat cp dirname env flock grep gzip mkdir mkfifo mktemp mv rm sed seq setsid".split()
TOOLS += "sha256sum sleep tail tar timeout".split()
FALSE_PYTHON = r"""#!/usr/bin/env bash
case "$*" in
  *'version_info[:3]'*) echo "${FALSE_VERSION:-3.11.9}"; exit ;;
  *'version_info < '*) [[ ${FALSE_VERSION:-3.11.9} != 3.9.* ]]; exit ;;
  *'import venv, ensurepip'*) exit "${FALSE_VENV_STATUS:-0}" ;;
  *'print(sys.version)'*) echo "3.11.9 (false)"; exit ;;
esac
echo "${*:2}" >>"$CALLS"
case "$*" in
  '-m venv'*) rm -rf "${!#}" && mkdir -p "${!#}/bin" && cp "$0" "${!#}/bin/python" ;;
  "-m ${FALSE_HANG:-none}"*)
    trap 'exit 75' TERM
    echo hanging >>"$CALLS"
    while ((SECONDS < 20)); do sleep 0.02; done ;;
  '-m angpt_jax.train'*) eval "${FALSE_TRAIN:-}" ;;
  '-m pytest'*) echo "3 passed in 0.01s" ;;
esac
[[ "$*" != "-m ${FALSE_FAIL:-none}"* ]] || exit "$FALSE_STATUS"
"""
# Writes down its name and words; "answer" gives what the test laid out, a line a call, the last one again and again.
FALSE_TOOL = r"""#!/usr/bin/env bash
echo "${0##*/} $*" >>"$CALLS"
answer() {
  local lines=()
  [[ ! -e $ANSWERS/$1 ]] || mapfile -t lines <"$ANSWERS/$1"
  printf '%s\n' "${lines[0]:-}"
  ((${#lines[@]} < 2)) || printf '%s\n' "${lines[@]:1}" >"$ANSWERS/$1"
}
"""
# A false train that runs until it is asked to stop, and in no case for ever.
HANG = 'echo "pid $$" >>"$CALLS"; trap "echo stopped; exit 75" TERM; echo hanging >>"$CALLS"; '
HANG += "while ((SECONDS < 20)); do sleep 0.02; done"
# A script can't trap what is ignored where the tests were started: SIGINT behind a shell's &, SIGHUP under nohup.
HEAR_SIGNALS = [str(shutil.which("env")), "--default-signal=HUP,INT,TERM"]


class Machine:
    """A copy of what the scripts need, in a folder with a space, on a PATH with a few tools and a false python3."""

    def __init__(self, folder: Path):
        self.root, self.tools, self.calls_file = folder / "a copy", folder / "bin", folder / "calls"
        self.answers = folder / "answers"
        for path in (self.root, self.tools, self.answers):
            path.mkdir()
        for name in COPIED:
            (shutil.copytree if (ROOT / name).is_dir() else shutil.copy)(ROOT / name, self.root / name)
        for name in TOOLS:
            (self.tools / name).symlink_to(shutil.which(name) or f"{name} is missing")
        self.tool("python3", FALSE_PYTHON)

    def tool(self, name: str, text: str = FALSE_TOOL) -> None:
        (self.tools / name).write_text(text)
        (self.tools / name).chmod(0o755)

    def answer(self, **lines: str) -> None:
        """What false tools answer: words, one for each call."""
        for name, text in lines.items():
            (self.answers / name).write_text("\n".join(text.split()) + "\n")

    def start(self, script: str, *flags: str, **environment: str) -> subprocess.Popen[str]:
        """The script in the background, in its own process group, called from another folder."""
        self.calls_file.write_text("")
        env = {"PATH": str(self.tools), "CALLS": str(self.calls_file), "ANSWERS": str(self.answers)}
        env |= {"ANGPT_ACCELERATOR": "cpu"} | environment
        command = [str(self.tools / "bash"), str(self.root / script), *flags]
        null, pipe = subprocess.DEVNULL, subprocess.PIPE
        return subprocess.Popen(
            [*HEAR_SIGNALS, *command],
            cwd="/",
            env=env,
            text=True,
            start_new_session=True,
            stdin=null,
            stdout=pipe,
            stderr=pipe,
        )

    def run(self, script: str, *flags: str, **environment: str) -> tuple[int, str, str]:
        with self.start(script, *flags, **environment) as process:
            return self.end(process)

    def end(self, process: subprocess.Popen[str]) -> tuple[int, str, str]:
        """Exit code, output and errors; a script that hangs is killed, and the test fails."""
        try:
            output, errors = process.communicate(timeout=20)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            raise
        return process.returncode, output, errors

    def calls(self) -> list[str]:
        return self.calls_file.read_text().splitlines()

    def modules(self) -> list[str]:
        return [call.split()[0] for call in self.calls()]

    def stamps(self) -> list[str]:
        return sorted(path.name for path in self.root.glob(".venv/stamps/*"))

    def files(self) -> list[Path]:
        return sorted(path.relative_to(self.root) for path in self.root.rglob("*"))

    def wait_until_hanging(self, times: int = 1) -> None:
        wait_for(lambda: self.calls().count("hanging") == times)

    def wait_until_gone(self) -> None:
        """Every process that wrote "pid N" to the calls has ended."""
        pids = [int(call.split()[1]) for call in self.calls() if call.startswith("pid ")]
        assert pids
        wait_for(lambda: not any(Path(f"/proc/{pid}").exists() for pid in pids))


def wait_for(true: Callable[[], bool]) -> None:
    end = time.monotonic() + 20
    while not true():
        assert time.monotonic() < end
        time.sleep(0.02)
