"""Lossless tokenizers: every id stands for a fixed string of bytes, and the bytes of a text's ids are the text."""

import hashlib
import json
import re
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import tokenizers
from tokenizers import models, pre_tokenizers, trainers

from angpt_jax.data.words import word_cache

END_OF_TEXT = "<|endoftext|>"
MIN_BPE_VOCAB = 257  # one id per byte and the end of a document
ENDS_OF_DOCUMENT = (END_OF_TEXT, "</s>")
PROBE = f" a  b\t\n\n c e\u0301\u00e9 \u6f22\u5b57 \U0001f642 don't 12345 {END_OF_TEXT} \r\n "
_PART_CHARACTERS = 1 << 16  # encoded at once; the library needs about 200 bytes of memory per byte of text
_LONGEST_PART = 1 << 20
_PARTS_AT_ONCE = 16
_WORD_GAP = re.compile(r"(?<=\w)(?= \w)")


class Tokenizer(ABC):
    """Text to ids and back: `decode(encode([x])[0]) == x`, and byte_lengths of the ids sum to the bytes of x.

    Args:
        pieces: bytes that each id stands for, none for a special id
        end_of_document: id that begins every document and ends the stream
        fingerprint: equal for two tokenizers only if they give the same ids
    """

    json: str  # the content of a file that `tokenizer_files.load_tokenizer` makes the same tokenizer of

    def __init__(self, pieces: Sequence[bytes], end_of_document: int, fingerprint: str):
        self.size = len(pieces)
        self.end_of_document = end_of_document
        self.fingerprint = fingerprint
        self.byte_lengths = np.array([len(piece) for piece in pieces], np.int64)
        self._pieces = tuple(pieces)

    @property
    def dtype(self) -> str:
        """The narrowest type that holds every id."""
        return "uint16" if self.size <= 2**16 else "uint32"

    @abstractmethod
    def encode(self, texts: Sequence[str]) -> list[np.ndarray]:
        """The ids of each text, without special ones, even where a text spells a special token out."""

    def document(self, text: str) -> list[int]:
        """The ids of a document that begins with `text`."""
        return [self.end_of_document, *self.encode([text])[0].tolist()]

    def decode(self, ids: Iterable[int]) -> str:
        """The text of the ids; special ids are dropped, bytes that are no UTF-8 and unknown ids become U+FFFD."""
        pieces = (self._pieces[i] if i < self.size else b"\xff" for i in ids)
        return b"".join(pieces).decode("utf-8", errors="replace")


class ByteTokenizer(Tokenizer):
    """Ids are the bytes of the UTF-8 text; the id behind them ends a document."""

    json = json.dumps({"tokenizer": "bytes"})

    def __init__(self):
        super().__init__([*(bytes([byte]) for byte in range(256)), b""], 256, "bytes")

    def encode(self, texts: Sequence[str]) -> list[np.ndarray]:
        return [np.frombuffer(text.encode(), np.uint8).astype(np.int32) for text in texts]


class FileTokenizer(Tokenizer):
    """A byte-level tokenizer.json, made lossless: what would change, cut or add to the text is switched off.

    Args:
        text: the content of the file; a ValueError says why it is of no use
    """

    def __init__(self, text: str):
        self.json = json.dumps(_lossless(json.loads(_parse(text).to_str())), ensure_ascii=False, sort_keys=True)
        self._backend = _parse(self.json)
        self._words = word_cache(json.loads(self.json), self._encode)
        ids = self._backend.get_vocab(with_added_tokens=True)
        ends = [ids[name] for name in ENDS_OF_DOCUMENT if name in ids]
        if not ends:
            raise ValueError(f"no token that ends a document ({' or '.join(ENDS_OF_DOCUMENT)})")
        fingerprint = hashlib.sha256(self.json.encode()).hexdigest()
        super().__init__(_pieces_by_id(self._backend, ids, ends[0]), ends[0], fingerprint)
        if not _NEEDED_PIECES <= set(ids) or self.decode(self.encode([PROBE])[0]) != PROBE:
            raise ValueError("not a byte-level tokenizer that gives back every text")

    def __reduce__(self):
        return type(self), (self.json,)  # the library's own pickle forgets encode_special_tokens

    def encode(self, texts: Sequence[str]) -> list[np.ndarray]:
        cut = [list(parts([text])) for text in texts]
        flat = [part for of_text in cut for part in of_text]
        ids: list[np.ndarray] = []
        for start in range(0, len(flat), _PARTS_AT_ONCE):
            group = flat[start : start + _PARTS_AT_ONCE]
            if self._words is not None:
                ids += self._words.encode(group)
            else:
                ids += [np.array(of_part, np.int32) for of_part in self._encode(group)]
        encoded = iter(ids)
        return [np.concatenate([next(encoded) for _ in of_text]) for of_text in cut]

    def _encode(self, texts: list[str]) -> list[list[int]]:
        """Of the library."""
        self._backend.encode_special_tokens = True  # a spelt-out special token is text like any other
        return [encoding.ids for encoding in self._backend.encode_batch_fast(texts)]


def train_bpe(texts: Iterable[str], vocab: int) -> FileTokenizer:
    """Byte-level BPE with `vocab` ids, or fewer if no pair of pieces is left that occurs twice; END_OF_TEXT is id 0."""
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(
        vocab_size=vocab,
        min_frequency=2,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=sorted(BYTE_ALPHABET),
        show_progress=False,
    )
    backend.train_from_iterator(texts, trainer)
    return FileTokenizer(backend.to_str())


def _byte_alphabet() -> dict[str, int]:
    """The character that stands for each byte in a byte-level vocabulary (the table of GPT-2), to its byte."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + n): byte for n, byte in enumerate(others)}


BYTE_ALPHABET = _byte_alphabet()
_NEVER_IN_UTF8 = frozenset({0xC0, 0xC1, *range(0xF5, 0x100)})  # GPT-NeoX has no ids for these
_NEEDED_PIECES = frozenset(character for character, byte in BYTE_ALPHABET.items() if byte not in _NEVER_IN_UTF8)


def _parse(text: str) -> tokenizers.Tokenizer:
    try:
        return tokenizers.Tokenizer.from_str(text)
    except Exception as error:  # the library raises the base class itself, and nothing narrower
        raise ValueError(f"not a tokenizer ({error})") from error


def _pieces_by_id(backend: tokenizers.Tokenizer, ids: dict[str, int], end_of_document: int) -> list[bytes]:
    added = backend.get_added_tokens_decoder()
    pieces = [b""] * (max(ids.values()) + 1)
    for name, i in ids.items():
        if i in added:  # matched in the text before the byte alphabet comes in
            pieces[i] = b"" if added[i].special else name.encode()
        elif i != end_of_document and all(character in BYTE_ALPHABET for character in name):
            pieces[i] = bytes(BYTE_ALPHABET[character] for character in name)
    return pieces


def _lossless(spec: dict[str, Any]) -> dict[str, Any]:
    """The tokenizer without normalizer, truncation, padding, added prefix, template and dropout."""
    added = [
        {**token, "special": token["special"] or token["content"] in ENDS_OF_DOCUMENT} for token in spec["added_tokens"]
    ]
    off = dict.fromkeys(("normalizer", "truncation", "padding", "post_processor"))
    model = {**spec["model"], "dropout": None} if spec["model"]["type"] == "BPE" else spec["model"]
    return {**spec, **off, "model": model, "added_tokens": added, "pre_tokenizer": _no_prefix(spec["pre_tokenizer"])}


def _no_prefix(step: dict[str, Any] | None) -> dict[str, Any] | None:
    """The pre-tokenizer without a space in front of the text."""
    if step and step["type"] == "Sequence":
        return {**step, "pretokenizers": [_no_prefix(inner) for inner in step["pretokenizers"]]}
    if step and step["type"] == "ByteLevel":
        return {**step, "add_prefix_space": False}
    return step


def parts(texts: Iterable[str]) -> Iterator[str]:
    """What the texts make up together, cut in front of a space between two words where it is long; usual tokenizers
    cut there anyway. Where there is no such space for very long, it is cut all the same: memory is bounded."""
    waiting, start, looked = "", 0, 0
    for text in texts:
        waiting, start, looked = waiting[start:] + text, 0, looked - start
        while len(waiting) - start > _PART_CHARACTERS:
            most = start + _LONGEST_PART
            gap = _WORD_GAP.search(waiting, max(looked, start + _PART_CHARACTERS), most)
            if gap is None and len(waiting) < most:
                looked = len(waiting) - 1  # a gap is known by one character in front of it and two behind
                break
            end = gap.start() if gap else most
            yield waiting[start:end]
            start = end
    yield waiting[start:]
