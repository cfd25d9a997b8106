"""Scores of token sequences: those that each has alone, whatever stands beside it, in few compiled shapes."""

from dataclasses import replace

import numpy as np
import pytest
from conftest import EVEN, Tiny, tiny

from angpt_jax.config import MeshConfig
from angpt_jax.data.tokenizer import ByteTokenizer
from angpt_jax.layout import Layout
from angpt_jax.model import How
from angpt_jax.scoring import Scorer, Window, lengths, windows
from angpt_jax.sharding import make_layout

CONTEXT, PADDED = 24, 264  # entries of the vocabulary, of which bytes use 257
END = 256


@pytest.fixture(scope="module")
def model() -> Tiny:
    """Its entries that stand for nothing are likelier than all others."""
    made = Tiny(tiny("gpt_plus", replace(EVEN, vocab=PADDED)).model)  # with parameters of its own
    made.random["head"] = made.random["head"].at[:, 257:].set(0).at[0, 257:].set(1e3).at[1, 257:].set(-1e3)
    return made


def scorer(model: Tiny, batch_size: int, layout: Layout | None = None) -> Scorer:
    decoder = model.model.clone(how=How(layout=layout or Layout()))
    return Scorer(decoder, model.random, ByteTokenizer(), CONTEXT, batch_size, shortest=8)


def pairs() -> list[tuple[list[int], list[int]]]:
    rng = np.random.default_rng(0)
    sizes = [(1, 1), (1, 5), (3, 4), (9, 2), (1, 15), (20, 4), (7, 1), (2, 30), (40, 3), (1, 61), (5, 0)]
    return [tuple(rng.integers(0, 257, size).tolist() for size in pair) for pair in sizes]


def alone(model: Tiny, context: list[int], target: list[int]) -> tuple[float, bool]:
    """Window by window, each by itself, at its own length, in float64."""
    log_p, is_greedy = 0.0, True
    for ids, scored in windows(context, target, CONTEXT):
        logits = model.logits(model.random, np.array([ids[:-1]]))[0, :, :257].astype(float)
        log_p_LV = logits - np.log(np.exp(logits - logits.max()).sum(-1, keepdims=True)) - logits.max()
        for at in range(len(ids) - scored - 1, len(ids) - 1):
            log_p += log_p_LV[at, ids[at + 1]]
            is_greedy &= log_p_LV[at].argmax() == ids[at + 1]
    return log_p, bool(is_greedy)


@pytest.mark.parametrize("batch_size", [1, 3, 8])
def test_scores_are_those_of_each_sequence_alone(model: Tiny, batch_size: int) -> None:
    found = scorer(model, batch_size).scores(pairs())
    expected = [alone(model, *pair) for pair in pairs()]
    np.testing.assert_allclose([score.log_p for score in found], [log_p for log_p, _ in expected], rtol=1e-5, atol=1e-5)
    assert [score.is_greedy for score in found] == [is_greedy for _, is_greedy in expected]


@pytest.mark.parametrize("mesh", [MeshConfig(), MeshConfig(fsdp=2, tensor=2, context=2, preset="context")], ids=str)
def test_eight_devices_give_the_scores_of_one(model: Tiny, mesh: MeshConfig) -> None:
    one = scorer(model, 8).scores(pairs())
    eight = scorer(model, 8, make_layout(mesh)).scores(pairs())
    np.testing.assert_allclose([s.log_p for s in eight], [s.log_p for s in one], rtol=1e-5, atol=1e-5)
    assert [s.is_greedy for s in eight] == [s.is_greedy for s in one]


def test_what_is_greedy_is_said_so(model: Tiny) -> None:
    """The likeliest ids behind a context, one after the other, among those that stand for something."""
    ids = [END]
    for _ in range(3):
        ids.append(int(model.logits(model.random, np.array([ids]))[0, -1, :257].argmax()))
    other = [*ids[1:3], (ids[3] + 1) % 257]
    found = scorer(model, 4).scores([(ids[:1], ids[1:]), (ids[:1], other), (ids[:3], ids[3:]), (ids, [])])
    assert [score.is_greedy for score in found] == [True, False, True, True]
    assert found[3].log_p == 0.0 and max(score.log_p for score in found[:3]) < 0


def test_what_takes_several_windows_is_greedy_in_all_of_them_or_not_at_all(model: Tiny) -> None:
    ids = [END, *range(50, 50 + CONTEXT)]
    last = int(model.logits(model.random, np.array([ids[1:]]))[0, -1, :257].argmax())
    long, alone = scorer(model, 4).scores([([END], [*ids[1:], last]), (ids[1:], [last])])
    assert (long.is_greedy, alone.is_greedy) == (False, True)


def test_there_are_no_more_programs_than_lengths(model: Tiny) -> None:
    made = scorer(model, 2)
    made.scores(pairs())
    assert made.compiled == len(lengths(CONTEXT, shortest=8)) == 3
    made.scores([([1] * length, [2]) for length in range(1, 50)])
    assert made.compiled == 3


def test_lengths_are_powers_of_two_that_devices_can_share_and_the_context() -> None:
    assert lengths(2048) == [128, 256, 512, 1024, 2048]
    assert lengths(1000) == [128, 256, 512, 1000]
    assert lengths(100) == [100]
    assert lengths(96, parts=3, shortest=8) == [96]
    assert lengths(32, parts=4, shortest=2) == [8, 16, 32]


def test_windows_hold_each_target_once_and_as_much_before_it_as_fits() -> None:
    """The example of lm_eval.api.model.LM.loglikelihood_rolling, and a context that is cut from the left."""
    assert list(windows([END], range(10), 4)) == [
        Window([END, 0, 1, 2, 3], 4),
        Window([3, 4, 5, 6, 7], 4),
        Window([5, 6, 7, 8, 9], 2),
    ]
    assert list(windows(range(10), [20, 21], 4)) == [Window([7, 8, 9, 20, 21], 2)]
    assert list(windows([1], [2], 4)) == [Window([1, 2], 1)]
    assert list(windows([1], [], 4)) == []
