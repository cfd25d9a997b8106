"""Text that is tokenized once: prepared tokens in the cache, found again by the content of the text."""

import hashlib
import json
import os
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from angpt_jax.data.corpus import Document, content_hash, read_documents
from angpt_jax.data.prepared import MANIFEST, TOKENIZER, Manifest, Prepared, open_prepared, write_manifest
from angpt_jax.data.shards import Shard, ShardWriter
from angpt_jax.data.tokenizer import ByteTokenizer, FileTokenizer, Tokenizer, train_bpe
from angpt_jax.errors import StorageError, UserError

Fingerprint = dict[str, str | int | float]
Splits = dict[str, list[Document]]  # train and validation

_FORMAT_VERSION = 2  # raise it when the same text would give other token files
_DOCUMENTS_AT_ONCE = 256


@dataclass(frozen=True)
class Text:
    """Documents of a source, and how they are split.

    Args:
        source: as it was given
        documents: all of them
        how: facts that decide the split
        split: makes it
    """

    source: str
    documents: list[Document]
    how: Fingerprint
    split: Callable[[list[Document]], Splits]

    @property
    def origin(self) -> Fingerprint:
        """What decides the text of each split."""
        name = os.path.basename(os.path.abspath(self.source))
        return {"format": _FORMAT_VERSION, "name": name, "text": content_hash(self.documents)} | self.how


def whole(source: str, tokenizer: Tokenizer, cache_dir: str | None, key: str) -> Prepared:
    """All of the text of `source`, in the split `validation`; `key` is what an error blames."""
    text = Text(
        source,
        read_documents(source, key),
        {"split": "validation"},
        lambda documents: {"train": [], "validation": documents},
    )
    return tokenized(text, "bytes" if isinstance(tokenizer, ByteTokenizer) else "file", tokenizer, 0, cache_dir)


def tokenized(text: Text, name: str, tokenizer: Tokenizer | None, vocab: int, cache_dir: str | None) -> Prepared:
    """The text as prepared tokens of the cache: there and whole, or else tokenized now.

    The cache is found by the content of the text and by the tokenizer, so it never goes stale, and processes that
    build the same one at the same time all end with good files.

    Args:
        text: what is tokenized
        name: of the tokenizer, in messages
        tokenizer: that makes the ids; None is a byte-level BPE of `vocab` entries, trained on the training split
        vocab: see above
        cache_dir: see `cache_root`
    """
    origin = text.origin
    made_by = tokenizer.fingerprint if tokenizer else f"bpe {vocab}"
    key = hashlib.sha256(json.dumps([origin, made_by]).encode()).hexdigest()[:32]
    folder = cache_root(cache_dir) / "tokens" / key
    cached = _cached(folder, origin)
    if cached is None:
        _build(folder, text, origin, name, tokenizer, vocab)
        cached = _cached(folder, origin)
    if cached is None:
        raise StorageError(f"data.cache_dir: token files changed while they were read, got {folder}; try again")
    return cached


def cache_root(cache_dir: str | None) -> Path:
    if cache_dir is not None:
        return Path(cache_dir).expanduser().absolute()
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "angpt_jax"


def _cached(folder: Path, origin: Fingerprint) -> Prepared | None:
    """What the folder holds, or None if anything differs from what its manifest promises."""
    try:
        prepared = open_prepared(folder, "data.cache_dir", check_all=True)
    except UserError:
        return None
    return prepared if prepared.manifest.source == origin else None


def _build(folder: Path, text: Text, origin: Fingerprint, name: str, tokenizer: Tokenizer | None, vocab: int) -> None:
    """Tokenizes into a temporary folder beside `folder` and moves the finished files into place."""
    splits = text.split(text.documents)
    megabytes = sum(len(document.text) for document in text.documents) / 1e6
    print(
        f"tokenizing {len(text.documents):,} documents ({megabytes:.1f} M characters) of {text.source} "
        f"with {name}; kept in {folder}",
        file=sys.stderr,
    )
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=f"{folder.name}.", dir=folder.parent) as temporary:
            building = Path(temporary)
            kind = name if name in ("bytes", "bpe") else "file"
            tokenizer = tokenizer or train_bpe((document.text for document in splits["train"]), vocab)
            if isinstance(tokenizer, FileTokenizer):
                (building / TOKENIZER).write_text(tokenizer.json, "utf-8")
            shards = {
                split: (_write_shard(building / f"{split}.bin", of_split, tokenizer, name),)
                for split, of_split in splits.items()
            }
            write_manifest(building, Manifest.of("memmap", tokenizer, kind, origin, shards))
            for path in sorted(building.iterdir(), key=lambda path: path.name == MANIFEST):
                path.replace(folder / path.name)  # the manifest last: it says that the others are there
    except OSError as error:
        raise StorageError(
            f"data.cache_dir: can't be written ({error.strerror}), got {folder.parent.parent}; "
            "a folder that this user may write, on a disk with room"
        ) from error


def _write_shard(path: Path, documents: Sequence[Document], tokenizer: Tokenizer, name: str) -> Shard:
    """Writes the ids of the documents, and checks that they stand for exactly the bytes of the text."""
    writer = ShardWriter(path, "memmap", tokenizer.dtype, tokenizer.end_of_document)
    try:
        for start in range(0, len(documents), _DOCUMENTS_AT_ONCE):
            group = documents[start : start + _DOCUMENTS_AT_ONCE]
            for document, ids in zip(group, tokenizer.encode([document.text for document in group]), strict=True):
                text_bytes = len(document.text.encode())
                if tokenizer.byte_lengths[ids].sum() != text_bytes:
                    raise UserError(
                        f"data.tokenizer: does not give back the text of {document.name}, got {name}; "
                        "a byte-level tokenizer that keeps every character"
                    )
                writer.add(ids, text_bytes)
        return writer.close()
    finally:
        writer.discard()
