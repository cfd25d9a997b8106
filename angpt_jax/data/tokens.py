"""Token files: the text of a run as two streams of ids on disk, made once and found again by their content."""

import hashlib
import json
import os
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from angpt_jax.config import DataConfig
from angpt_jax.data.corpus import Document, content_hash, read_documents, split_documents
from angpt_jax.data.tokenizer import MIN_BPE_VOCAB, ByteTokenizer, Tokenizer, load_tokenizer, train_bpe
from angpt_jax.errors import StorageError, UserError

Fingerprint = dict[str, str | int | float]

_FORMAT_VERSION = 1  # raise it when the same text would give other token files
_DOCUMENTS_AT_ONCE = 256
_SPLITS = ("train", "validation")
_MANIFEST = "manifest.json"
_TOKENIZER = "tokenizer.json"


@dataclass(frozen=True)
class TokenFile:
    """A stream of ids on disk: an end-of-document id in front of every document, and one behind the last."""

    path: str
    dtype: str
    count: int

    def open(self) -> np.memmap:
        """The ids, memory-mapped; open it where it is read, because a pickled memmap is a copy of the file."""
        return np.memmap(self.path, dtype=self.dtype, mode="r", shape=(self.count,))


@dataclass(frozen=True)
class TokenData:
    """Both streams of a run, and the fingerprint of all that made them."""

    tokenizer: Tokenizer
    train: TokenFile
    validation: TokenFile
    fingerprint: Fingerprint


def load_tokens(data: DataConfig, vocab: int) -> TokenData:
    """The token files of a config, from the cache if they are there and whole, else tokenized now.

    The cache is found by the content of the text and by the tokenizer, so it never goes stale, and processes that
    build the same one at the same time all end with good files.
    """
    documents = read_documents(data.source)
    tokenizer = _given_tokenizer(data.tokenizer, vocab)
    origin: Fingerprint = {
        "format": _FORMAT_VERSION,
        "source": os.path.basename(os.path.abspath(data.source)),
        "text": content_hash(documents),
        "validation_fraction": data.validation_fraction,
    }
    made_by = tokenizer.fingerprint if tokenizer else f"bpe {vocab}"
    key = hashlib.sha256(json.dumps([origin, made_by]).encode()).hexdigest()[:32]
    folder = cache_root(data.cache_dir) / "tokens" / key
    cached = _cached(folder, tokenizer, origin)
    if cached is None:
        _build(folder, documents, data, vocab, tokenizer, origin)
        cached = _cached(folder, tokenizer, origin)
    if cached is None:
        raise StorageError(f"data.cache_dir: token files changed while they were read, got {folder}; try again")
    return cached


def _given_tokenizer(name: str, vocab: int) -> Tokenizer | None:
    """The tokenizer that a config names, or None for one that is to be trained; its ids fit into the vocabulary."""
    tokenizer = None
    needed = MIN_BPE_VOCAB
    if name != "bpe":
        tokenizer = ByteTokenizer() if name == "bytes" else load_tokenizer(name)
        needed = tokenizer.size
    if needed > vocab:
        raise UserError(
            f"model.vocab: smaller than the tokenizer (data.tokenizer: {name}) of {needed} ids, got {vocab}; "
            f"{needed} or more, or another data.tokenizer"
        )
    return tokenizer


def cache_root(cache_dir: str | None) -> Path:
    if cache_dir is not None:
        return Path(cache_dir).expanduser().absolute()
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "angpt_jax"


def _cached(folder: Path, tokenizer: Tokenizer | None, origin: Fingerprint) -> TokenData | None:
    """What the folder holds, or None if anything differs from what its manifest promises."""
    try:
        manifest = json.loads((folder / _MANIFEST).read_text("utf-8"))
        tokenizer = tokenizer or load_tokenizer(str(folder / _TOKENIZER))
        if manifest != _describe(folder, tokenizer, origin):
            return None
    except (OSError, ValueError):  # UserError is a ValueError
        return None
    dtype = _dtype(tokenizer)
    train, validation = (
        TokenFile(str(folder / f"{split}.bin"), dtype, manifest["files"][split]["count"]) for split in _SPLITS
    )
    return TokenData(tokenizer, train, validation, manifest["fingerprint"])


def _describe(folder: Path, tokenizer: Tokenizer, origin: Fingerprint) -> dict[str, dict]:
    """The manifest of the token files as they are now: whatever is damaged makes it another one."""
    files = {}
    for split in _SPLITS:
        with (folder / f"{split}.bin").open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
            size = file.tell()
        count = size // np.dtype(_dtype(tokenizer)).itemsize
        files[split] = {"dtype": _dtype(tokenizer), "count": count, "bytes": size, "sha256": digest}
    return {"fingerprint": {**origin, "tokenizer": tokenizer.fingerprint}, "files": files}


def _dtype(tokenizer: Tokenizer) -> str:
    return "uint16" if tokenizer.size <= 2**16 else "uint32"


def _build(
    folder: Path,
    documents: list[Document],
    data: DataConfig,
    vocab: int,
    tokenizer: Tokenizer | None,
    origin: Fingerprint,
) -> None:
    """Tokenizes into a temporary folder beside `folder` and moves the finished files into place."""
    splits = dict(zip(_SPLITS, split_documents(documents, data.validation_fraction), strict=True))
    megabytes = sum(len(document.text) for document in documents) / 1e6
    print(
        f"tokenizing {len(documents):,} documents ({megabytes:.1f} M characters) of {data.source} "
        f"with {data.tokenizer}; kept in {folder}",
        file=sys.stderr,
    )
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=f"{folder.name}.", dir=folder.parent) as temporary:
            building = Path(temporary)
            if tokenizer is None:
                tokenizer = train_bpe((document.text for document in splits["train"]), vocab)
                (building / _TOKENIZER).write_text(tokenizer.json, "utf-8")
            for split, of_split in splits.items():
                _write_stream(building / f"{split}.bin", of_split, tokenizer, data.tokenizer)
            manifest = _describe(building, tokenizer, origin)
            (building / _MANIFEST).write_text(json.dumps(manifest, indent=1), "utf-8")
            for path in sorted(building.iterdir(), key=lambda path: path.name == _MANIFEST):
                path.replace(folder / path.name)  # the manifest last: it says that the others are there
    except OSError as error:
        raise StorageError(
            f"data.cache_dir: can't be written ({error.strerror}), got {folder.parent.parent}; "
            "a folder that this user may write, on a disk with room"
        ) from error


def _write_stream(path: Path, documents: Sequence[Document], tokenizer: Tokenizer, name: str) -> None:
    """Writes the ids of the documents, and checks that they stand for exactly the bytes of the text."""
    dtype = _dtype(tokenizer)
    end_of_document = np.array([tokenizer.end_of_document], dtype)
    with path.open("wb") as file:
        for start in range(0, len(documents), _DOCUMENTS_AT_ONCE):
            group = documents[start : start + _DOCUMENTS_AT_ONCE]
            for document, ids in zip(group, tokenizer.encode([document.text for document in group]), strict=True):
                if tokenizer.byte_lengths[ids].sum() != len(document.text.encode()):
                    raise UserError(
                        f"data.tokenizer: does not give back the text of {document.name}, got {name}; "
                        "a byte-level tokenizer that keeps every character"
                    )
                file.write(end_of_document.tobytes())
                file.write(ids.astype(dtype).tobytes())
        file.write(end_of_document.tobytes())
