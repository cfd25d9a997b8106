"""metrics.jsonl: one object a line, each step once, whatever happened before."""

import errno
import json
import math
import struct
from pathlib import Path
from typing import Any

import pytest

from angpt_jax import metrics
from angpt_jax.metrics import MetricsWriter, read


def write(folder: Path, resumed_step: int, *records: dict) -> list[dict]:
    with MetricsWriter(folder, resumed_step) as writer:
        for record in records:
            writer.write(record)
    return read(folder / "metrics.jsonl")


def test_records_come_back_as_they_were_written(tmp_path: Path) -> None:
    records = [{"step": 1, "loss": 2.5, "mfu": None}, {"step": 2, "loss": 0.1 + 0.2, "mfu": None}]
    assert write(tmp_path, 0, *records) == records


def test_a_resume_drops_the_steps_that_will_come_again(tmp_path: Path) -> None:
    write(tmp_path, 0, *({"step": step, "loss": 1.0} for step in range(1, 6)))
    steps = [record["step"] for record in write(tmp_path, 3, {"step": 4, "loss": 2.0})]
    assert steps == [1, 2, 3, 4]


def test_half_a_line_is_left_out_and_written_over(tmp_path: Path) -> None:
    write(tmp_path, 0, {"step": 1, "loss": 1.0})
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 2, "lo')
    assert [record["step"] for record in write(tmp_path, 1, {"step": 2, "loss": 1.0})] == [1, 2]


def test_every_line_is_json_also_for_numbers_that_json_lacks(tmp_path: Path) -> None:
    write(tmp_path, 0, {"step": 1, "loss": math.nan, "lr": math.inf})
    assert "NaN" not in (tmp_path / "metrics.jsonl").read_text()
    assert json.loads((tmp_path / "metrics.jsonl").read_text()) == {"step": 1, "loss": "nan", "lr": "inf"}


def events_of(folder: Path) -> list[Any]:
    """What the only file of TensorBoard's holds: length, checksum, event, checksum, again and again."""
    (path,), found = folder.glob("events.*"), []
    data = path.read_bytes()
    while data:
        (length,) = struct.unpack("Q", data[:8])
        found.append(metrics.Event.FromString(data[12 : 12 + length]))
        data = data[16 + length :]
    return found


def test_tensorboard_gets_the_same_numbers_and_what_to_forget(tmp_path: Path) -> None:
    write(tmp_path, 3, {"step": 4, "loss": 1.5, "mfu": None, "lr": math.nan})
    version, start, loss = events_of(tmp_path / "tensorboard")
    assert version.file_version == "brain.Event:2"
    assert (start.step, start.session_log.status) == (4, metrics.SessionLog.START)
    assert (loss.step, loss.summary.value[0].tag, loss.summary.value[0].simple_value) == (4, "loss", 1.5)


def test_a_full_disk_is_an_error_here_and_hides_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*what: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.raises(OSError, match="No space"), metrics.MetricsWriter(tmp_path, 0) as writer:
        monkeypatch.setattr(metrics.EventsWriter, "write_event", full)
        for step in range(1, 100):
            writer.write({"step": step, "loss": 1.0})
    monkeypatch.undo()
    close = metrics.EventsWriter.close
    monkeypatch.setattr(metrics.EventsWriter, "close", lambda events: (close(events), full()))
    with pytest.raises(ValueError, match="this"), metrics.MetricsWriter(tmp_path, 0):
        raise ValueError("this")
    with pytest.raises(OSError, match="No space"), metrics.MetricsWriter(tmp_path, 0):
        pass
