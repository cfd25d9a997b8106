"""Ids of known words are those that the library gives to the whole text."""

import random

import numpy as np
import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, models, pre_tokenizers, trainers

from angpt_jax.data import words
from angpt_jax.data.corpus import read_documents
from angpt_jax.data.tokenizer import FileTokenizer, train_bpe

PIECES = [
    *"a b the 's 'll 've don't DON'T 1 23 _ . .. ( ; é e\u0301 漢字 🙂 ’s ² ⅷ ٣ ª ʼ \u200b \u180e \ufeff".split(" "),
    *"\x00 \x1c \x1f <|endoftext|>".split(" "),
    *(" ", " ", "  ", "   ", "\n", "\n\n", "\t", "\r\n", "\x0b", "\x85", "\xa0", "\u2003", "\u2028", "\u3000"),
]
TEXTS = [
    "The quick brown fox's tail; don't look\n    at 12 lazy dogs.  é 漢字\n" * 30,
    "def f(x):\n    return x + 1\n" * 30,
]


def library() -> tokenizers.Tokenizer:
    """Like GPT-NeoX's: some tokens are runs of spaces."""
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    letters = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=400, special_tokens=["<|endoftext|>"], initial_alphabet=letters)
    backend.train_from_iterator(TEXTS, trainer)
    return backend


def with_gaps() -> tokenizers.Tokenizer:
    backend = library()
    backend.add_tokens([AddedToken(" " * n, normalized=True) for n in (2, 3, 4, 8)])
    return backend


TOKENIZERS = {"plain": FileTokenizer(library().to_str()), "gaps": FileTokenizer(with_gaps().to_str())}


def check(tokenizer: FileTokenizer, texts: list[str]) -> None:
    assert tokenizer._words is not None
    for text, ids, whole in zip(texts, tokenizer.encode(texts), tokenizer._encode(texts), strict=True):
        assert ids.dtype == np.int32 and ids.tolist() == whole, text


@pytest.mark.parametrize("name", TOKENIZERS)
def test_strange_neighbours_give_the_ids_of_the_library(name):
    rng = random.Random(0)
    texts = ["".join(rng.choices(PIECES, k=rng.randrange(25))) for _ in range(6_000)]
    check(TOKENIZERS[name], texts)


@settings(max_examples=150, deadline=None)
@given(text=st.text(max_size=40), name=st.sampled_from(sorted(TOKENIZERS)))
def test_any_text_gives_the_ids_of_the_library(text, name):
    check(TOKENIZERS[name], [text, f"a {text} b"])


def test_source_text_gives_the_ids_of_the_library():
    texts = [document.text for document in read_documents("stdlib")[::12]]
    check(TOKENIZERS["gaps"], texts)
    check(train_bpe(texts, 1000), texts)


def test_what_is_kept_is_bounded(monkeypatch):
    monkeypatch.setattr(words, "_MOST", 1000)
    tokenizer = FileTokenizer(library().to_str())
    cache = tokenizer._words
    assert cache is not None
    for number in range(50):
        check(tokenizer, [f"word{number} " * 3 + "x" * 100])
        assert sum(map(len, cache._ids)) < 2000
    assert 0 < len(cache._ids) < 40


def changed(kind: str) -> tokenizers.Tokenizer:
    backend = library()
    if kind == "token":
        backend.add_tokens(["fox's tail"])
    elif kind == "strip":
        backend.add_tokens([AddedToken("    ", rstrip=True)])
    elif kind == "regex":
        backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    else:
        digits = pre_tokenizers.Digits(individual_digits=True)
        backend.pre_tokenizer = pre_tokenizers.Sequence([digits, pre_tokenizers.ByteLevel(add_prefix_space=False)])
    return backend


@pytest.mark.parametrize("kind", ["token", "strip", "regex", "digits"])
def test_a_tokenizer_that_cuts_in_another_way_is_left_to_the_library(kind):
    tokenizer = FileTokenizer(changed(kind).to_str())
    assert tokenizer._words is None
    assert [ids.tolist() for ids in tokenizer.encode(TEXTS)] == tokenizer._encode(TEXTS)
