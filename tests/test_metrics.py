"""metrics.jsonl: one object a line, each step once, whatever happened before."""

import json
import math
from pathlib import Path

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


def test_tensorboard_gets_the_same_numbers(tmp_path: Path) -> None:
    write(tmp_path, 0, {"step": 1, "loss": 1.0})
    (events,) = (tmp_path / "tensorboard").glob("events.*")
    assert b"loss" in events.read_bytes()
