"""What lm-evaluation-harness asks of a model: likelihoods of continuations and of whole texts, and new text."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from conftest import Tiny
from harness_models import BYTES, CONTEXT, END, Greedy, harness_model
from harness_models import model as make_model

from angpt_jax.data.tokenizer import train_bpe
from angpt_jax.decoding import Draw


@pytest.fixture(scope="module")
def model() -> Tiny:
    return make_model()


def requests(kind: Any, arguments: Sequence[tuple]) -> list[Any]:
    from lm_eval.api.instance import Instance

    return [Instance(kind, {}, one, number) for number, one in enumerate(arguments)]


def log_p(model: Tiny, context: list[int], target: list[int]) -> float:
    """By the definition, in one pass over ids that fit."""
    ids = np.array([*context, *target])
    logits_LV = model.logits(model.random, ids[None, :-1])[0, :, :257].astype(float)
    log_p_LV = logits_LV - np.log(np.exp(logits_LV).sum(-1, keepdims=True))
    return float(sum(log_p_LV[at - 1, ids[at]] for at in range(len(context), len(ids))))


def test_the_likelihood_of_a_continuation(model: Tiny) -> None:
    """Spaces at the end of the context belong to the continuation; without a context a document begins."""
    pairs = [("one", " two"), ("one ", "two"), ("", "two"), (" ", "two"), ("one", "")]
    found = harness_model(model).loglikelihood(requests("loglikelihood", pairs))
    expected = [
        log_p(model, [*b"one"], [*b" two"]),
        log_p(model, [*b"one"], [*b" two"]),
        log_p(model, [END], [*b"two"]),
        log_p(model, [END], [*b" two"]),
        0.0,
    ]
    np.testing.assert_allclose([number for number, _ in found], expected, rtol=1e-5)
    assert [is_greedy for _, is_greedy in found] == [False] * 4 + [True]
    assert all(type(number) is float and type(is_greedy) is bool for number, is_greedy in found)


def test_a_long_context_is_cut_from_the_left(model: Tiny) -> None:
    text = "a context that is much longer than the window"
    ((found, _),) = harness_model(model).loglikelihood(requests("loglikelihood", [(text, " of it")]))
    assert found == pytest.approx(log_p(model, [*text.encode()][-(CONTEXT + 1 - 6) :], [*b" of it"]), rel=1e-5)


def test_a_tokenizer_that_merges_across_the_border(model: Tiny) -> None:
    """The convention of the harness; where it leaves nothing to score, each side has its own ids."""
    tokenizer = train_bpe(["abab abab abab cd cd cd"] * 9, 262)
    whole, alone = tokenizer.encode(["ab ab", "ab a"])
    assert len(whole) == len(alone) - 1 or len(whole) <= len(alone)
    lm = harness_model(model, tokenizer)
    assert lm._pair("ab", " ab") == (lm.tok_encode("ab"), lm.tok_encode("ab ab")[len(lm.tok_encode("ab")) :])
    assert len(lm.tok_encode("ab")) == len(lm.tok_encode("a")) == 1
    assert lm._pair("a", "b") == (lm.tok_encode("a"), lm.tok_encode("b"))
    assert lm._pair("cd a", "b cd")[0] == lm.tok_encode("cd a")


def test_a_whole_text_is_one_document(model: Tiny) -> None:
    texts = ["short", "", "a text that is longer than a window of the model, so that there are several"]
    found = harness_model(model).loglikelihood_rolling(requests("loglikelihood_rolling", [(text,) for text in texts]))
    ids = [END, *texts[2].encode()]
    rolled = log_p(model, ids[:1], ids[1:25]) + log_p(model, ids[24:25], ids[25:49])
    rolled += log_p(model, ids[48:49], ids[49:73]) + log_p(model, ids[-25:73], ids[73:])
    assert len(ids) == 76
    np.testing.assert_allclose(found, [log_p(model, [END], [*b"short"]), 0.0, rolled], rtol=1e-5)


def test_text_is_generated_up_to_a_stop_string(model: Tiny) -> None:
    greedy = Greedy(model)
    whole = BYTES.decode(greedy.continued([*b"one"], 12, None))
    assert len(whole) == 12
    stop, cut = whole[5:7], whole[: whole.index(whole[5:7])]
    asked = [
        ("one", {"until": [stop, "never"], "max_gen_toks": 12}),
        ("two", {"until": [stop, "never"], "max_gen_toks": 12, "do_sample": False, "temperature": 0.7}),
        ("one", {"until": "never", "max_gen_toks": 3}),
        ("a prompt that is longer than the window", {"until": [], "max_gen_toks": 99}),
        ("", {"until": ["x"], "do_sample": True, "temperature": 0.5, "top_k": 3, "max_gen_toks": 1}),
        ("one", {"do_sample": True, "max_gen_toks": 1}),
    ]
    found = harness_model(model, generator=greedy).generate_until(requests("generate_until", asked))
    assert harness_model(model).generate_until(requests("generate_until", asked[:4])) == found[:4]
    other = BYTES.decode(greedy.continued([*b"two"], 12, None)).partition(stop)[0]
    assert found[:3] == [cut, other, whole[:3]]
    assert found[3] == BYTES.decode(greedy.continued([*b"r than the window"][-12:], 12, None))
    assert greedy.asked == [
        (4, 12, Draw(0.0, None, None)),
        (4, 3, Draw(0.0, None, None)),
        (4, 12, Draw(0.0, None, None)),
        (4, 1, Draw(0.5, 3, None)),
        (4, 1, Draw(1.0, None, None)),
    ]
