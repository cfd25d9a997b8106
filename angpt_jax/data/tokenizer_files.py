"""A tokenizer from its file: a Hugging Face tokenizer.json, a SentencePiece .model, or what `prepare` or a run kept."""

import base64
from pathlib import Path

from angpt_jax import json_text
from angpt_jax.data.sentencepieces import KEY, SentencePieceTokenizer
from angpt_jax.data.tokenizer import ENDS_OF_DOCUMENT, ByteTokenizer, FileTokenizer, Tokenizer
from angpt_jax.errors import UserError

ALLOWED = (
    f"bytes, bpe, or the path of a byte-level tokenizer.json with {' or '.join(ENDS_OF_DOCUMENT)}, or of a "
    "SentencePiece .model"
)


def load_tokenizer(path: str, field: str = "data.tokenizer", allowed: str = ALLOWED) -> Tokenizer:
    """The tokenizer of a Hugging Face tokenizer.json, or of a SentencePiece .model; an error blames `field` and says
    what is `allowed` there."""
    try:
        content = Path(path).expanduser().read_bytes()
        spec = None if path.endswith(".model") else json_text.parsed(content.decode("utf-8"))
    except OSError as error:
        raise UserError(f"{field}: can't be read ({error.strerror}), got {path}; {allowed}") from error
    except ValueError as error:
        raise UserError(f"{field}: not JSON ({error}), got {path}; {allowed}") from error
    try:
        if spec is None:
            return SentencePieceTokenizer(content)
        if spec == json_text.parsed(ByteTokenizer.json):
            return ByteTokenizer()
        if isinstance(spec, dict) and KEY in spec:
            return SentencePieceTokenizer(_decoded(spec[KEY]))
        return FileTokenizer(content.decode("utf-8"))
    except ModuleNotFoundError as error:
        raise UserError(f"{field}: needs {error.name}, got {path}; pip install -e '.[sentencepiece]'") from error
    except ValueError as error:
        raise UserError(f"{field}: {error}, got {path}; {allowed}") from error


def _decoded(text: object) -> bytes:
    try:
        return base64.b64decode(text if isinstance(text, str) else "-", validate=True)
    except ValueError as error:
        raise ValueError("not what prepare keeps of a SentencePiece model") from error
