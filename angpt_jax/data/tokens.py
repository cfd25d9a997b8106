"""The tokens of a run: prepared folders as they are, or text that is tokenized once and found again by its content."""

import hashlib
import json
import os
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from angpt_jax.config import DataConfig
from angpt_jax.data.corpus import Document, content_hash, read_documents, split_documents, unreadable
from angpt_jax.data.prepared import (
    MANIFEST,
    SPLITS,
    TOKENIZER,
    Manifest,
    Prepared,
    is_prepared,
    open_prepared,
    write_manifest,
)
from angpt_jax.data.shards import Shard, ShardWriter, TokenStream
from angpt_jax.data.tokenizer import MIN_BPE_VOCAB, ByteTokenizer, FileTokenizer, Tokenizer, train_bpe
from angpt_jax.data.tokenizer_files import load_tokenizer
from angpt_jax.errors import StorageError, UserError

Fingerprint = dict[str, str | int | float]

_FORMAT_VERSION = 2  # raise it when the same text would give other token files
_DOCUMENTS_AT_ONCE = 256


@dataclass(frozen=True)
class Weighted:
    """One source of the mixture: its name, its stream, and its share of the rows."""

    name: str
    stream: TokenStream
    weight: float = 1.0


@dataclass(frozen=True)
class TokenData:
    """What a run trains on and is judged by, and the fingerprint of all that made it.

    Args:
        tokenizer: of all streams
        train: the sources and their weights
        validation: streams by name; `validation` is that of the sources
        fingerprint: equal only for the same tokens
    """

    tokenizer: Tokenizer
    train: tuple[Weighted, ...]
    validation: dict[str, TokenStream]
    fingerprint: Fingerprint


def load_tokens(data: DataConfig, vocab: int) -> TokenData:
    """The tokens of a config: of `data.source`, or of the folders of `data.mixture`, and the validation sets."""
    sources = data.mixture or {data.source: 1.0}
    key = "data.mixture" if data.mixture else "data.source"
    trained_on = {source: _open(source, data, vocab, key) for source in sources}
    judged_on = {
        name: _open(source, data, vocab, "data.validation_sets") for name, source in data.validation_sets.items()
    }
    main, *others = trained_on
    tokenizer = trained_on[main].tokenizer
    for name, prepared in (trained_on | judged_on).items():
        if prepared.tokenizer.fingerprint != tokenizer.fingerprint:
            raise UserError(
                f"{key}: all data need one tokenizer, got {name} of tokenizer {prepared.tokenizer.fingerprint[:12]} "
                f"beside {main} of {tokenizer.fingerprint[:12]}; prepare them with the same one"
            )
    named = [("validation", trained_on[main]), *((Path(source).name, trained_on[source]) for source in others)]
    named += judged_on.items()
    validation = {name: prepared.stream("validation") for name, prepared in named}
    if len(validation) < len(named):
        names = [name for name, _ in named]
        twice = next(name for name in names if names.count(name) > 1)
        raise UserError(
            f"data.validation_sets: names must differ, got {twice} twice in {', '.join(names)}; `validation` is that "
            "of the source or of the first of the mixture, the others have the names of their folders"
        )
    return TokenData(
        tokenizer,
        tuple(Weighted(source, prepared.stream("train"), sources[source]) for source, prepared in trained_on.items()),
        validation,
        _fingerprint(trained_on, sources),
    )


def _fingerprint(trained_on: dict[str, Prepared], weights: dict[str, float]) -> Fingerprint:
    """Of the training data: what they are made from and by, and the ids themselves."""
    facts: Fingerprint = {}
    for number, (source, prepared) in enumerate(trained_on.items()):
        manifest, prefix = prepared.manifest, f"{number}." if len(trained_on) > 1 else ""
        ids = "".join(shard.sha256 for shard in manifest.splits["train"])
        named: Fingerprint = {"source": os.path.basename(os.path.abspath(source)), "weight": weights[source]}
        named |= {"tokens": hashlib.sha256(ids.encode()).hexdigest(), "tokenizer": prepared.tokenizer.fingerprint}
        facts |= {prefix + name: value for name, value in named.items()}
    return facts


def _open(source: str, data: DataConfig, vocab: int, key: str) -> Prepared:
    """The prepared folder that `source` is, or the one of the cache that its text is tokenized into."""
    folder = Path(source).expanduser()
    if not _is_prepared(folder, key):
        prepared = _tokenized(source, data, vocab)
    else:
        prepared = open_prepared(folder, key)
        _check_tokenizer(prepared, data.tokenizer, source)
    size = prepared.tokenizer.size
    _check_vocab(vocab, data.tokenizer or source, size, size)
    return prepared


def _is_prepared(folder: Path, key: str) -> bool:
    try:
        return is_prepared(folder)
    except OSError as error:
        unreadable(error, key)


def _check_vocab(vocab: int, tokenizer: str, size: int, needed: int) -> None:
    """Raises a UserError if the model has fewer entries than the ids of a tokenizer need."""
    if needed > vocab:
        raise UserError(
            f"model.vocab: smaller than the tokenizer (data.tokenizer: {tokenizer}) of {size} ids, got {vocab}; "
            f"{needed} or more, or another data.tokenizer"
        )


def _check_tokenizer(prepared: Prepared, name: str | None, source: str) -> None:
    """Raises a UserError if a config names another tokenizer than the one that made the tokens."""
    kind = prepared.manifest.tokenizer["kind"]
    if name is None or name == kind:
        return
    fits = name not in ("bytes", "bpe") and load_tokenizer(name).fingerprint == prepared.tokenizer.fingerprint
    if not fits:
        raise UserError(
            f"data.tokenizer: not the tokenizer that made {source} ({kind}, {prepared.tokenizer.size} ids), "
            f"got {name}; null takes the one that made it"
        )


def _tokenized(source: str, data: DataConfig, vocab: int) -> Prepared:
    """The text of `source` as prepared tokens of the cache: there and whole, or else tokenized now.

    The cache is found by the content of the text and by the tokenizer, so it never goes stale, and processes that
    build the same one at the same time all end with good files.
    """
    documents = read_documents(source)
    name = data.tokenizer or "bytes"
    tokenizer = _given_tokenizer(name, vocab)
    origin: Fingerprint = {
        "format": _FORMAT_VERSION,
        "name": os.path.basename(os.path.abspath(source)),
        "text": content_hash(documents),
        "validation_fraction": data.validation_fraction,
    }
    made_by = tokenizer.fingerprint if tokenizer else f"bpe {vocab}"
    key = hashlib.sha256(json.dumps([origin, made_by]).encode()).hexdigest()[:32]
    folder = cache_root(data.cache_dir) / "tokens" / key
    cached = _cached(folder, origin)
    if cached is None:
        _build(folder, documents, data, vocab, tokenizer, origin)
        cached = _cached(folder, origin)
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
    _check_vocab(vocab, name, needed, needed)
    return tokenizer


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


def _build(
    folder: Path,
    documents: list[Document],
    data: DataConfig,
    vocab: int,
    tokenizer: Tokenizer | None,
    origin: Fingerprint,
) -> None:
    """Tokenizes into a temporary folder beside `folder` and moves the finished files into place."""
    splits = dict(zip(SPLITS, split_documents(documents, data.validation_fraction), strict=True))
    megabytes = sum(len(document.text) for document in documents) / 1e6
    name = data.tokenizer or "bytes"
    print(
        f"tokenizing {len(documents):,} documents ({megabytes:.1f} M characters) of {data.source} "
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
