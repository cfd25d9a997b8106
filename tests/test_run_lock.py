"""One run at a time in a run directory."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from angpt_jax.errors import UserError
from angpt_jax.processes.group import ALONE
from angpt_jax.run_lock import NAME, locked


def lock_of(folder: Path, **owner: object) -> Path:
    """A lock like that of this process, apart from `owner`."""
    with locked(folder, ALONE):
        mine = json.loads((folder / NAME).read_text())
    (folder / NAME).write_text(json.dumps(mine | owner))
    return folder / NAME


def dead_process() -> int:
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    return process.pid


def test_a_second_run_is_refused_and_told_who_is_there(tmp_path: Path) -> None:
    with locked(tmp_path, ALONE):
        before = (tmp_path / NAME).read_bytes()
        with pytest.raises(UserError) as error, locked(tmp_path, ALONE):
            pytest.fail("two runs at once")
        assert (tmp_path / NAME).read_bytes() == before
    (line,) = error.value.problems
    start = f"run.dir: is in use, got '{tmp_path}', where process {os.getpid()} on {socket.gethostname()} runs since 20"
    assert line.startswith(start) and line.endswith("; wait for it or use another --run.dir")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("error", [RuntimeError, SystemExit, KeyboardInterrupt])
def test_it_is_released_after_an_error(tmp_path: Path, error: type[BaseException]) -> None:
    with pytest.raises(error), locked(tmp_path, ALONE):
        raise error
    assert list(tmp_path.iterdir()) == []


def test_that_of_a_dead_process_is_taken_over_with_a_warning(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pid = dead_process()
    lock_of(tmp_path, pid=pid, token="another")
    with locked(tmp_path, ALONE):
        assert json.loads((tmp_path / NAME).read_text())["pid"] == os.getpid()
    said = capsys.readouterr().err
    assert said.startswith("angpt_jax: warning: run.dir: the run before did not end by itself, got a lock of process ")
    assert f" {pid} " in said and said.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


def test_another_process_with_the_number_of_a_dead_one_is_not_the_owner(tmp_path: Path) -> None:
    lock_of(tmp_path, process_started="1", token="another")
    with locked(tmp_path, ALONE):
        pass
    assert list(tmp_path.iterdir()) == []


def test_a_process_that_was_killed_and_not_yet_buried_is_dead(tmp_path: Path) -> None:
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    try:
        fields = Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()
        lock_of(tmp_path, pid=process.pid, process_started=fields[19])
        with pytest.raises(UserError, match=f"process {process.pid} on "), locked(tmp_path, ALONE):
            pass
        process.kill()
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        with locked(tmp_path, ALONE):
            pass
    finally:
        process.kill()
        process.communicate()


def test_that_of_another_machine_is_refused_with_advice(tmp_path: Path) -> None:
    lock = lock_of(tmp_path, host="elsewhere", pid=dead_process())
    with pytest.raises(UserError, match=rf" on elsewhere runs since .*; if it is gone, remove '{lock}'$"):
        with locked(tmp_path, ALONE):
            pass
    assert lock.exists()


def test_one_that_is_not_ours_any_more_is_left(tmp_path: Path) -> None:
    with locked(tmp_path, ALONE):
        (tmp_path / NAME).write_text(json.dumps({"pid": 1, "host": "elsewhere", "since": "now", "token": "other"}))
    assert (tmp_path / NAME).exists()
    (tmp_path / NAME).unlink()
    with locked(tmp_path, ALONE):
        (tmp_path / NAME).unlink()


def test_one_that_says_nothing_is_refused_with_advice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("angpt_jax.run_lock.WRITTEN_SECONDS", 0.1)
    (tmp_path / NAME).touch()
    with pytest.raises(UserError, match=r"says not whose it is, got '.*/run\.lock'; .*remove it$"):
        with locked(tmp_path, ALONE):
            pass
