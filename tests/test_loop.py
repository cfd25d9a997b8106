"""What the loop leans on: batches that are under way before they are asked for, and a word when data are slow."""

import itertools

import pytest

from angpt_jax import sharding
from angpt_jax.loop import InputBound


def record(step: int, waited: float) -> dict:
    return {"step": step, "step_seconds": 0.2, "data_wait_seconds": waited}


def test_batches_are_put_on_the_devices_ahead_and_none_is_lost():
    put = []

    def putter(batch: int) -> int:
        put.append(batch)
        return -batch

    batches = sharding.ahead(itertools.count(), putter, count=2)
    assert next(batches) == 0 and put == [0, 1]
    assert [next(batches) for _ in range(3)] == [-1, -2, -3]
    assert put == [0, 1, 2, 3, 4]


def test_batches_that_end_are_all_given_out():
    assert list(sharding.ahead(iter(range(5)), lambda batch: batch, count=2)) == [0, 1, 2, 3, 4]
    assert list(sharding.ahead(iter(range(1)), lambda batch: batch, count=2)) == [0]


def test_waiting_for_data_is_said_once_with_the_remedy():
    warning = InputBound(workers=0)
    assert warning.of(record(10, waited=0.01)) is None
    said = warning.of(record(20, waited=0.03))
    assert said == (
        "step 20: 15% of a step is waiting for data; try --data.workers 2, or tokens made by angpt_jax.prepare on a "
        "faster disk"
    )
    assert warning.of(record(30, waited=0.2)) is None


@pytest.mark.parametrize("workers, advised", [(0, 2), (2, 4)])
def test_more_workers_are_advised_than_there_are(workers, advised):
    assert f"--data.workers {advised}," in (InputBound(workers).of(record(1, waited=1.0)) or "")
