"""Batch k is the same batch wherever training starts, and however many processes or workers read it."""

import dataclasses
import itertools
import pickle
import subprocess
import sys
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from token_streams import assert_same_batches, numbered, stack, write_stream

from angpt_jax.data.pipeline import Batch, Order, Packing, train_batches
from angpt_jax.data.tokens import Weighted

LENGTHS = [7, 0, 3, 60, 1, 12, 5, 33, 2, 9, 18, 0, 4, 25, 6] * 3
PARTS, PACKINGS, PROCESSES = (st.sampled_from(of) for of in ([1, 2], get_args(Packing), [1, 2, 4]))
STEPS = 70  # several epochs of either packing
ORDER = Order(context=8, batch_size=4, seed=1)
every_packing = pytest.mark.parametrize("packing", get_args(Packing))


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> list[Weighted]:
    """One of raw ids and one of records; the first alone is no mixture."""
    folder = tmp_path_factory.mktemp("streams")
    raw = write_stream(folder, numbered(LENGTHS), shards=3, name="raw")
    records = write_stream(folder, numbered(LENGTHS[::-1]), shards=2, format="array_record", name="records")
    return [Weighted("raw", raw, 0.7), Weighted("records", records, 0.3)]


def batches_of(train: Sequence[Weighted], order: Order, start: int, count: int, **options: Any) -> list[Batch]:
    with closing(train_batches(train, order, start=start, **options)) as batches:
        return list(itertools.islice(batches, count))


@pytest.fixture(scope="module")
def uninterrupted(sources) -> dict[tuple[int, Packing], list[Batch]]:
    """STEPS batches, by the number of sources and the packing."""
    return {
        (count, packing): batches_of(sources[:count], dataclasses.replace(ORDER, packing=packing), 0, STEPS)
        for count in (1, 2)
        for packing in get_args(Packing)
    }


@settings(max_examples=30, deadline=None, derandomize=True)
@given(st.integers(0, STEPS - 1), st.integers(1, 20), PARTS, PACKINGS, PROCESSES)
def test_fresh_iterator_continues_exactly(sources, uninterrupted, start, count, parts, packing, processes):
    """Also by another number of processes than before: their rows, taken in turn, are those of one process."""
    order = dataclasses.replace(ORDER, packing=packing)
    expected = uninterrupted[parts, packing][start : start + count]
    shares = [
        batches_of(sources[:parts], order, start, len(expected), process_index=index, process_count=processes)
        for index in range(processes)
    ]
    for index, share in enumerate(shares):
        mine = [{name: array[index::processes] for name, array in batch.items()} for batch in expected]
        assert_same_batches(share, mine)


@every_packing
@pytest.mark.parametrize("processes", [2, 4])
def test_processes_read_rows_that_no_other_reads(sources, packing, processes):
    """Each within an epoch in which no row is read twice."""
    order = dataclasses.replace(ORDER, packing=packing)
    steps = 6
    shares = [
        stack(batches_of(sources[:1], order, 0, steps, process_index=index, process_count=processes))["tokens"]
        for index in range(processes)
    ]
    assert all(share.shape == (steps * ORDER.batch_size // processes, ORDER.context + 1) for share in shares)
    rows = [tuple(row) for share in shares for row in share.tolist()]
    assert len(set(rows)) == steps * ORDER.batch_size


WORKER_SCRIPT = """
import sys
sys.path.insert(0, {tests!r})
import pickle
from contextlib import closing
from pathlib import Path
import numpy as np
from angpt_jax.data.pipeline import train_batches

def main():
    train, cases = pickle.loads(Path({cases!r}).read_bytes())
    read = []
    for order, start, count in cases:
        with closing(train_batches(train, order, start=start, workers=2)) as batches:
            taken = (next(batches) for _ in range(count))
            read.append([{{name: np.array(array) for name, array in batch.items()}} for batch in taken])
    Path({read!r}).write_bytes(pickle.dumps(read))

if __name__ == "__main__":
    main()
"""


def test_worker_processes_read_the_same_batches_from_any_start(sources, uninterrupted, tmp_path):
    """In a process of its own, which leaves neither a warning nor shared memory behind."""
    paths = {"tests": str(Path(__file__).parent), "cases": str(tmp_path / "cases"), "read": str(tmp_path / "read")}
    starts: dict[Packing, int] = {"concatenate": 37, "best_fit": 0}
    cases = [(dataclasses.replace(ORDER, packing=packing), start, 20) for packing, start in starts.items()]
    Path(paths["cases"]).write_bytes(pickle.dumps((sources, cases)))
    (tmp_path / "script.py").write_text(WORKER_SCRIPT.format(**paths), "utf-8")
    done = subprocess.run([sys.executable, str(tmp_path / "script.py")], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stderr) == (0, "")
    for (packing, start), batches in zip(starts.items(), pickle.loads(Path(paths["read"]).read_bytes()), strict=True):
        assert_same_batches(batches, uninterrupted[2, packing][start : start + 20])


@every_packing
def test_processes_may_have_one_row_each(sources, uninterrupted, packing):
    order = dataclasses.replace(ORDER, packing=packing)
    (batch,) = batches_of(sources, order, 5, 1, process_index=3, process_count=4)
    expected = uninterrupted[2, packing][5]
    assert_same_batches([batch], [{name: array[3:] for name, array in expected.items()}])


def test_a_start_far_away_costs_nothing(sources):
    """Random access: nothing before it is read."""
    far = 10**9
    batches = batches_of(sources, ORDER, far, 3)
    assert_same_batches(batches[1:], batches_of(sources, ORDER, far + 1, 2))
    assert not np.array_equal(batches[0]["tokens"], batches[1]["tokens"])
