"""The run directory at the start: what can't be written or has no room is refused, and nothing stays behind."""

import errno
import os
import subprocess
from collections import namedtuple
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from commands import tmpfs

from angpt_jax import cli, run_dir
from angpt_jax.config import Config
from angpt_jax.errors import StorageError, UserError

MB = 10**6


def everything(folder: Path) -> list[str]:
    return sorted(str(path) for path in folder.rglob("*"))


def refused(folder: Path, directory: Path, state_bytes: int = 1000) -> str:
    """What the preflight says; it changes nothing below `folder`."""
    before = everything(folder)
    with pytest.raises(UserError) as error:
        run_dir.preflight(directory, state_bytes)
    assert everything(folder) == before
    assert error.value.exit_code == 2
    (line,) = error.value.problems
    return line


def test_it_leaves_the_folder_of_the_checkpoints_and_nothing_else(tmp_path: Path) -> None:
    run_dir.preflight(tmp_path / "runs/x", 1000)
    assert everything(tmp_path) == [str(tmp_path / part) for part in ("runs", "runs/x", "runs/x/checkpoints")]


@pytest.mark.parametrize("name", ["a_file", "a_file/x/y", "new/a_file/../../a_file"])
def test_a_file_is_no_run_directory(tmp_path: Path, name: str) -> None:
    (tmp_path / "a_file").touch()
    line = refused(tmp_path, tmp_path / name)
    assert line.startswith(f"run.dir: can't be written, got '{tmp_path}/{name}' (")


@pytest.mark.parametrize("call", ["fsync", "rename", "mkdir"])
@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EROFS, errno.EACCES, errno.EIO])
def test_what_the_disk_refuses_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str, number: int) -> None:
    def fails(*given: object, **more: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os if call == "fsync" else Path, call, fails)
    assert f"run.dir: can't be written, got '{tmp_path}/runs/x' ({os.strerror(number)})" in refused(
        tmp_path, tmp_path / "runs/x"
    )


def test_there_must_be_room_for_two_checkpoints(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """For one, where there is one already."""
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr("shutil.disk_usage", lambda folder: usage(100 * MB, 85 * MB, 15 * MB))
    assert refused(tmp_path, tmp_path / "x", 10 * MB) == (
        f"run.dir: must have room for two checkpoints, got '{tmp_path}/x' with 15.0 MB free; 20.0 MB are needed"
    )
    (tmp_path / "x/checkpoints/5").mkdir(parents=True)
    run_dir.preflight(tmp_path / "x", 10 * MB)
    assert "15.0 MB free; 16.0 MB are needed" in refused(tmp_path, tmp_path / "x", 16 * MB)


@pytest.fixture
def mounted(tmp_path: Path) -> Iterator[Path]:
    """A file system of 1 MB, read-only at first."""
    with tmpfs(tmp_path / "mounted", "size=1m,ro") as folder:
        yield folder


def test_a_disk_that_is_read_only_or_full_is_refused(mounted: Path) -> None:
    assert "(Read-only file system)" in refused(mounted, mounted / "x")
    subprocess.run(["mount", "-o", "remount,rw", mounted], check=True)
    assert "MB free; 1.8 MB are needed" in refused(mounted, mounted / "x", 900_000)
    with suppress(OSError), (mounted / "fill").open("wb", buffering=0) as file:
        while file.write(bytes(4096)):
            pass
    assert "(No space left on device)" in refused(mounted, mounted / "x", 0)


def config(*flags: str) -> Config:
    needed = ["--model.arch", "angpt", "--model.width", "32", "--model.layers", "2", "--model.heads", "2"]
    needed += ["--model.vocab", "300", "--model.context", "32", "--optim.peak_lr", "1e-3", "--run.steps", "4"]
    needed += ["--data.source", "text", "--data.tokenizer", "bytes", "--data.batch_size", "8"]
    return cli.parse(Config, [*needed, *flags], command="train")


def test_checkpoints_without_a_config_are_refused(tmp_path: Path) -> None:
    run_dir.preflight(tmp_path, 0)
    run_dir.check(tmp_path, config())
    (tmp_path / "checkpoints" / "5").mkdir()
    for resume in ("auto", "never", "must"):
        with pytest.raises(UserError, match=r"^run\.dir: holds checkpoints but no config\.yaml, got "):
            run_dir.check(tmp_path, config("--run.resume", resume))


def test_what_resume_asks_for_is_checked(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"^run\.resume: must, but there is no run in "):
        run_dir.check(tmp_path, config("--run.resume", "must"))
    (tmp_path / "config.yaml").write_text(cli.to_yaml(config()))
    run_dir.check(tmp_path, config("--run.resume", "must"))
    with pytest.raises(UserError, match=r"^run\.dir: holds a run already, got .*; use another one"):
        run_dir.check(tmp_path, config("--run.resume", "never"))
    with pytest.raises(UserError) as error:
        run_dir.check(tmp_path, config("--model.width", "64", "--model.layers", "3"))
    assert [line.partition(":")[0] for line in error.value.problems] == ["model.width", "model.layers"]


def test_a_disk_that_fails_at_work_is_storage_trouble(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match=r"run\.dir: can't be written any more, got 'some/file' \(No space left"):
        with run_dir.storage(tmp_path):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "some/file")
    with pytest.raises(FileNotFoundError), run_dir.storage(tmp_path):
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), "a bug")
