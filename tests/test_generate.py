"""Batches of prompts: where rows end, what is compiled, and that nothing depends on the other rows or on the mesh."""

from functools import cache
from typing import Any

import jax
import numpy as np
import pytest
from conftest import EVEN, Tiny, tiny

from angpt_jax import sharding
from angpt_jax.config import MeshConfig
from angpt_jax.data.tokenizer import ByteTokenizer
from angpt_jax.decoding import Draw
from angpt_jax.generate import CHUNK, MANY_ROWS, Generator, bucket, own_products
from angpt_jax.how import How

CONTEXT = 48
PROMPTS = [[60, 3, 7], [60, 9], [60, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11]]


class Known(ByteTokenizer):
    """A tokenizer that has all but a few of the model's entries."""

    def __init__(self) -> None:
        super().__init__()
        self.size, self.end_of_document = 61, 60


def generator(model: Tiny) -> Generator:
    return Generator(model.model, model.random, Known(), CONTEXT)


@cache
def shared() -> Generator:
    return generator(tiny("angpt", EVEN))


def test_a_row_ends_at_the_context_and_at_most() -> None:
    few = shared().batch(PROMPTS, 7, Draw(1.0))
    many = shared().batch(PROMPTS, 1000, Draw(1.0))
    for prompt, short, long in zip(PROMPTS, few, many, strict=True):
        assert short == long[: len(short)]
        assert len(short) <= 7 and len(prompt) + len(long) <= CONTEXT
    assert any(len(prompt) + len(long) == CONTEXT for prompt, long in zip(PROMPTS, many, strict=True))


def test_the_end_of_a_document_ends_a_row_and_is_not_part_of_it() -> None:
    ids = shared().batch([[60]] * 64, 40, Draw(3.0))
    assert not any(60 in row for row in ids)
    ended = [row for row in ids if len(row) < 40]
    assert 8 < len(ended) < 56  # 1 of 61 ids ends it


def test_entries_that_stand_for_nothing_are_never_drawn() -> None:
    ids = shared().batch([[60]] * 64, 40, Draw(1000.0))
    assert {token for row in ids for token in row} <= set(range(60))


def test_stop_ends_a_row_with_the_token_that_made_it_true() -> None:
    whole = shared().batch(PROMPTS, 30)
    stopped = shared().batch(PROMPTS, 30, stop=lambda ids: len(ids) >= 5 and ids[0] == whole[0][0])
    assert stopped[0] == whole[0][:5]
    assert stopped[1:] == [row[:5] if row[0] == whole[0][0] else row for row in whole[1:]]


def test_the_stream_gives_the_first_token_alone_and_then_chunks() -> None:
    bits = list(shared().stream(PROMPTS, 2 + CHUNK))
    assert [max(map(len, new)) for new in bits] == [1, CHUNK, 1]
    rows = [sum((new[number] for new in bits), []) for number in range(len(PROMPTS))]
    assert rows == shared().batch(PROMPTS, 2 + CHUNK)


def test_it_is_a_function_of_the_seed() -> None:
    draw = Draw(1.0)
    assert shared().batch(PROMPTS, 9, draw, seed=1) == shared().batch(PROMPTS, 9, draw, seed=1)
    assert shared().batch(PROMPTS, 9, draw, seed=1) != shared().batch(PROMPTS, 9, draw, seed=2)
    same = shared().batch([PROMPTS[0]] * 2, 9, draw)
    assert same[0] != same[1]


def test_a_row_is_the_same_beside_other_rows() -> None:
    together = shared().batch(PROMPTS, 9, Draw(1.0))
    assert shared().batch(PROMPTS[:1], 9, Draw(1.0)) == together[:1]
    assert shared().batch([PROMPTS[0], PROMPTS[2]], 9, Draw(1.0))[0] == together[0]


@pytest.mark.parametrize(("length", "places"), [(1, 16), (16, 16), (17, 32), (32, 32), (33, 64), (64, 64), (65, 128)])
def test_buckets(length: int, places: int) -> None:
    assert bucket(length) == places


def test_another_length_of_the_bucket_compiles_nothing() -> None:
    mine = generator(tiny("angpt", EVEN))
    compiled: list[Any] = []

    def programs() -> int:
        return sum(program._cache_size() for program in mine.programs(Draw(), 2))

    for length in (1, 2, 9, 16):
        mine.batch([[60] * length] * 2, 20)
        compiled.append(programs())
    assert compiled == [2, 2, 2, 2]
    mine.batch([[60] * 17] * 2, 20)
    assert programs() == 4


def test_many_rows_have_the_tokens_of_few() -> None:
    """On a CPU another library computes their products."""
    assert MANY_ROWS <= len(PROMPTS) * 3
    assert shared().batch([*PROMPTS] * 3, 9) == shared().batch(PROMPTS, 9) * 3


def test_products_stay_what_they_are_where_there_is_no_other_kind(monkeypatch: pytest.MonkeyPatch) -> None:
    assert own_products() is not None

    def refuse(*_: Any, **__: Any) -> Any:
        raise jax.errors.JaxRuntimeError("INVALID_ARGUMENT: No such compile option")

    monkeypatch.setattr(jax, "jit", refuse)
    assert own_products.__wrapped__() is None


MESHES = [MeshConfig(replica=-1, fsdp=1), MeshConfig(replica=2, fsdp=2, tensor=2)]


@pytest.mark.parametrize("mesh", MESHES, ids=["replicas", "replica x fsdp x tensor"])
def test_a_mesh_gives_the_same_tokens(mesh: MeshConfig) -> None:
    model = tiny("angpt", EVEN)
    layout = sharding.make_layout(mesh)
    params = jax.device_put(model.random, sharding.parameter_shardings(model.axes, layout))
    sharded = Generator(model.model.clone(how=How(layout=layout)), params, Known(), CONTEXT)
    assert sharded.batch(PROMPTS, 9) == shared().batch(PROMPTS, 9)


def test_the_prompt_may_fill_all_but_one_place() -> None:
    prompt = [60, *np.arange(CONTEXT - 2).tolist()]
    assert len(shared().batch([prompt], 50)[0]) <= 1
