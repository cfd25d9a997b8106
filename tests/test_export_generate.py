"""Text from an export: with a cache as without, padded or not, from ids of its tokenizer that are ours."""

import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import sentencepiece
import torch
from exports import CONTEXT, END, batch, logits, made, write
from exports_in_torch import load_model, load_tokenizer
from exports_in_torch import logits as torch_logits
from transformers import DynamicCache

from angpt_jax.data.sentencepieces import SentencePieceTokenizer
from angpt_jax.data.tokenizer import PROBE, ByteTokenizer, Tokenizer, train_bpe

TEXTS = ["", "a", PROBE, "def f(x):\n\treturn x  # \u00e9\u0301 \U0001f642", "<|endoftext|>", "\0\x7f"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("made") / "x", made("ngpt", kv_heads=2))


@pytest.fixture(scope="module")
def model(folder: Path) -> Any:
    return load_model(folder)


def longer(model: Any, ids: Any, **options: Any) -> np.ndarray:
    """What 20 further tokens are, even if a document ends."""
    made = model.generate(ids, max_new_tokens=20, min_new_tokens=20, do_sample=False, **options)
    return made[:, -20:].numpy()


@pytest.mark.parametrize("name", ["cache", "past_key_values"])
def test_a_cache_changes_no_logit(model: Any, name: str) -> None:
    """Token by token behind the first three, with the end of a document among the later ones; by both names."""
    cache, ids = DynamicCache(), torch.tensor(batch()).long()
    parts = [torch_logits(model, part.numpy(), **{name: cache}) for part in (ids[:, :3], *ids[:, 3:].split(1, dim=1))]
    np.testing.assert_allclose(np.concatenate(parts, axis=1), torch_logits(model, batch()), atol=2e-6)
    assert cache.get_seq_length() == 12


@pytest.mark.parametrize("options", [{}, {"num_beams": 2}, {"cache_implementation": "static"}], ids=str)
def test_text_is_the_same_with_and_without_a_cache(model: Any, options: dict[str, Any]) -> None:
    ids = torch.tensor(batch()).long()
    without = {name: value for name, value in options.items() if name != "cache_implementation"}
    assert np.array_equal(longer(model, ids, **options), longer(model, ids, use_cache=False, **without))


def test_greedy_text_is_that_of_our_logits(model: Any) -> None:
    """The likeliest id again and again, as `sample` draws at temperature 0."""
    exported, ids = made("ngpt", kv_heads=2), batch(rows=1, length=4)
    for _ in range(4):
        ids = np.concatenate([ids, logits(exported, ids)[:, -1:].argmax(-1).astype(np.int32)], axis=1)
    found = model.generate(torch.tensor(ids[:, :4]).long(), max_new_tokens=4, do_sample=False)
    assert found.tolist() == ids.tolist()


def test_padding_on_the_left_changes_nothing(model: Any, folder: Path) -> None:
    tokenizer, texts = load_tokenizer(folder), ["short", "a text that is longer"]
    both = tokenizer(texts, padding=True, return_tensors="pt")
    assert both.attention_mask[0].tolist() == [0] * 16 + [1] * 6 and both.input_ids[0, 16] == END
    padded = longer(model, both.input_ids, attention_mask=both.attention_mask)
    alone = [longer(model, tokenizer(text, return_tensors="pt").input_ids)[0] for text in texts]
    assert padded.tolist() == [row.tolist() for row in alone]
    whole = torch_logits(model, both.input_ids.numpy(), attention_mask=both.attention_mask)[0, 16:]
    np.testing.assert_allclose(whole, torch_logits(model, both.input_ids[:1, 16:].numpy())[0], atol=2e-6)


def test_what_is_masked_is_not_seen_whatever_it_is(model: Any) -> None:
    """Also where no document begins behind it, and one step at a time."""
    text, junk = batch()[1:2, 1:], batch()[2:3, 1:6]
    whole, mask = np.concatenate([junk, text], axis=1), torch.ones(1, 16, dtype=torch.long)
    mask[:, :5] = 0
    expected, cache = torch_logits(model, text), DynamicCache()
    np.testing.assert_allclose(torch_logits(model, whole, attention_mask=mask)[:, 5:], expected, atol=2e-6)
    torch_logits(model, whole[:, :15], attention_mask=mask[:, :15], cache=cache)
    last = torch_logits(model, whole[:, 15:], attention_mask=mask, cache=cache)
    np.testing.assert_allclose(last[:, -1], expected[:, -1], atol=2e-6)


def test_text_ends_with_the_context_or_its_document(model: Any) -> None:
    start = torch.tensor([[END, 72]])
    assert model.generate(start, min_length=CONTEXT, do_sample=False).shape == (1, CONTEXT)
    to_the_end = torch.nn.functional.one_hot(torch.tensor([[END]]), END + 1).float()
    hook = model.logits.register_forward_hook(lambda module, given, logits: to_the_end)
    assert model.generate(start, do_sample=False).tolist() == [[END, 72, END]]
    hook.remove()


def of_pieces(kind: str) -> Tokenizer:
    """A SentencePiece model of 400 pieces."""
    model, lines = io.BytesIO(), iter([f"the number {n} is followed by {n + 1}, and so on" for n in range(500)])
    settings: dict[str, Any] = {"vocab_size": 400, "model_type": kind, "byte_fallback": True, "minloglevel": 2}
    sentencepiece.SentencePieceTrainer.Train(sentence_iterator=lines, model_writer=model, **settings)
    return SentencePieceTokenizer(model.getvalue())


MAKERS = {
    "bytes": ByteTokenizer,
    "bpe": lambda: train_bpe(TEXTS * 3, 280),
    "pieces": lambda: of_pieces("bpe"),
    "pieces, unigram": lambda: of_pieces("unigram"),
}


@pytest.mark.parametrize("kind", MAKERS)
def test_ids_are_ours(kind: str, tmp_path: Path) -> None:
    """With the id in front that begins a document; one that is spelt out is text."""
    tokenizer: Tokenizer = MAKERS[kind]()
    theirs = load_tokenizer(write(tmp_path / "x", made("gpt_plus"), tokenizer=tokenizer))
    for text, ours in zip(TEXTS, tokenizer.encode(TEXTS), strict=True):
        assert theirs(text).input_ids == [tokenizer.end_of_document, *ours]
        assert theirs(text, add_special_tokens=False).input_ids == ours.tolist()
        assert theirs.decode(ours, skip_special_tokens=True) == text
    assert theirs.decode([tokenizer.end_of_document], skip_special_tokens=True) == ""
    ids = theirs.bos_token_id, theirs.eos_token_id, theirs.pad_token_id
    assert ids == (tokenizer.end_of_document,) * 3
    assert (theirs.padding_side, theirs.model_max_length) == ("left", CONTEXT)
