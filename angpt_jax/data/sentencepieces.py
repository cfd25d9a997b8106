"""SentencePiece models as lossless tokenizers. The library is an extra: pip install -e '.[sentencepiece]'."""

import base64
import hashlib
import json
from collections.abc import Sequence
from typing import Any

import numpy as np

from angpt_jax.data.tokenizer import PROBE, FileTokenizer, Tokenizer

SPACE = "\u2581"  # how a piece writes a space
KEY = "sentencepiece"  # of the JSON that keeps a model


class SentencePieceTokenizer(FileTokenizer):
    """A SentencePiece model with byte fallback, made lossless: what normalizes the text or puts a space in front of it
    is switched off.

    Args:
        model: the content of a .model file; a ValueError says why it is of no use
    """

    def __init__(self, model: bytes):
        self._model = _lossless(model)
        self._processor = _processor(self._model)
        self.json = json.dumps({KEY: base64.b64encode(self._model).decode("ascii")})
        end = self._processor.eos_id()
        if end < 0:
            raise ValueError("no token that ends a document (</s>)")
        self.end_piece, self.unknown_piece = map(self._processor.id_to_piece, (end, self._processor.unk_id()))
        ids = range(self._processor.get_piece_size())
        fingerprint = hashlib.sha256(self._model).hexdigest()
        Tokenizer.__init__(self, [_bytes_of(self._processor, i) for i in ids], end, fingerprint)
        self._space = [self._processor.piece_to_id(f"<0x{byte:02X}>") for byte in SPACE.encode()]
        if self.decode(self.encode([PROBE + SPACE])[0]) != PROBE + SPACE:
            raise ValueError("not a SentencePiece model that gives back every text (train it with byte_fallback)")

    def __reduce__(self):
        return type(self), (self._model,)

    def encode(self, texts: Sequence[str]) -> list[np.ndarray]:
        return [self._encode_one(text) for text in texts]

    def _encode_one(self, text: str) -> np.ndarray:
        """The character that stands for a space is spelt in bytes."""
        first, *rest = self._processor.encode(text.split(SPACE))
        return np.array(first + [i for part in rest for i in [*self._space, *part]], np.int32)


def _lossless(model: bytes) -> bytes:
    """The model without normalization, added prefix and removed spaces."""
    from sentencepiece import sentencepiece_model_pb2  # an extra, and slow to import

    messages: Any = sentencepiece_model_pb2  # made when it is imported
    proto = messages.ModelProto()
    try:
        proto.ParseFromString(model)
    except Exception as error:  # protobuf has one DecodeError for each of its implementations
        raise ValueError(f"not a SentencePiece model ({error})") from error
    for spec in (proto.normalizer_spec, proto.denormalizer_spec):
        spec.name, spec.precompiled_charsmap = "identity", b""
        spec.add_dummy_prefix = spec.remove_extra_whitespaces = False
    return proto.SerializeToString(deterministic=True)


def _processor(model: bytes) -> Any:
    from sentencepiece import SentencePieceProcessor

    try:
        return SentencePieceProcessor(model_proto=model)
    except RuntimeError as error:
        raise ValueError(f"not a SentencePiece model ({error})") from error


def _bytes_of(processor: Any, i: int) -> bytes:
    if processor.is_control(i) or processor.is_unknown(i) or processor.is_unused(i):
        return b""
    piece = processor.id_to_piece(i)
    return bytes([int(piece[3:5], 16)]) if processor.is_byte(i) else piece.replace(SPACE, " ").encode()
