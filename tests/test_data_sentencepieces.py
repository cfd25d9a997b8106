"""SentencePiece models give back every text, or are refused; and they are kept and found like any tokenizer."""

import io
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import sentencepiece

from angpt_jax.data.sentencepieces import SPACE, SentencePieceTokenizer
from angpt_jax.data.tokenizer_files import load_tokenizer
from angpt_jax.errors import UserError

TEXTS = ["", " ", "  two  spaces\n\n\ttabs ", "e\u0301 é 漢字 🙂 </s> <0x0A>", f"a{SPACE}b{SPACE}{SPACE}", "\r\n\0"]
Train = Callable[..., bytes]


@pytest.fixture(scope="module")
def train() -> Train:
    """Trains a model of 400 pieces; what it does to text is as the library's default would have it."""

    def train(**options: Any) -> bytes:
        model = io.BytesIO()
        lines = iter([f"the number {n} is followed by {n + 1}, and so on" for n in range(500)])
        settings: dict[str, Any] = {"vocab_size": 400, "model_type": "bpe", "byte_fallback": True, "minloglevel": 2}
        sentencepiece.SentencePieceTrainer.Train(sentence_iterator=lines, model_writer=model, **(settings | options))
        return model.getvalue()

    return train


@pytest.fixture(scope="module")
def tokenizer(train: Train) -> SentencePieceTokenizer:
    return SentencePieceTokenizer(train())


@pytest.mark.parametrize("text", TEXTS)
def test_a_text_comes_back_byte_for_byte(tokenizer: SentencePieceTokenizer, text: str) -> None:
    (ids,) = tokenizer.encode([text])
    assert tokenizer.decode(ids) == text
    assert tokenizer.byte_lengths[ids].sum() == len(text.encode())
    assert tokenizer.end_of_document not in ids


def test_its_pieces_are_used(tokenizer: SentencePieceTokenizer) -> None:
    (ids,) = tokenizer.encode([" the number is followed"])
    assert len(ids) < 8 and ids.dtype == np.int32


def test_the_end_of_a_document_is_the_end_of_a_sentence(tokenizer: SentencePieceTokenizer, train: Train) -> None:
    assert tokenizer.end_of_document == 2 and tokenizer.byte_lengths[2] == 0
    with pytest.raises(ValueError, match="no token that ends a document"):
        SentencePieceTokenizer(train(eos_id=-1))


def test_a_model_without_bytes_is_refused(train: Train) -> None:
    with pytest.raises(ValueError, match="byte_fallback"):
        SentencePieceTokenizer(train(byte_fallback=False, vocab_size=80))


def test_it_is_kept_and_found_and_pickled(tokenizer: SentencePieceTokenizer, train: Train, tmp_path: Path) -> None:
    (tmp_path / "mine.model").write_bytes(train())
    (tmp_path / "tokenizer.json").write_text(tokenizer.json)
    for found in (
        load_tokenizer(str(tmp_path / "mine.model")),
        load_tokenizer(str(tmp_path / "tokenizer.json")),
        pickle.loads(pickle.dumps(tokenizer)),
    ):
        assert found.fingerprint == tokenizer.fingerprint
        np.testing.assert_array_equal(found.encode([TEXTS[3]])[0], tokenizer.encode([TEXTS[3]])[0])


def test_a_file_of_another_kind_is_refused_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "mine.model").write_bytes(b"not a model")
    with pytest.raises(UserError, match=r"^data\.tokenizer: not a SentencePiece model"):
        load_tokenizer(str(tmp_path / "mine.model"))
