"""The tokens of a run: prepared folders as they are, or text that is tokenized once and found again by its content."""

import hashlib
import os
from dataclasses import dataclass
from pathlib import Path

from angpt_jax.config import DataConfig
from angpt_jax.data import text_cache
from angpt_jax.data.corpus import read_documents, split_documents, unreadable
from angpt_jax.data.prepared import SPLITS, Prepared, is_prepared, open_prepared
from angpt_jax.data.shards import TokenStream
from angpt_jax.data.text_cache import Fingerprint, Text
from angpt_jax.data.tokenizer import MIN_BPE_VOCAB, ByteTokenizer, Tokenizer
from angpt_jax.data.tokenizer_files import load_tokenizer
from angpt_jax.errors import UserError


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
    others = {name: _open(source, data, vocab, "data.validation_sets") for name, source in data.validation_sets.items()}
    main, *rest = trained_on
    tokenizer = trained_on[main].tokenizer
    for name, prepared in (trained_on | others).items():
        if prepared.tokenizer.fingerprint != tokenizer.fingerprint:
            raise UserError(
                f"{key}: all data need one tokenizer, got {name} of tokenizer {prepared.tokenizer.fingerprint[:12]} "
                f"beside {main} of {tokenizer.fingerprint[:12]}; prepare them with the same one"
            )
    named = [("validation", trained_on[main]), *((Path(source).name, trained_on[source]) for source in rest)]
    named += others.items()
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


def judged_on(source: str, tokenizer: Tokenizer, cache_dir: str | None, key: str) -> TokenStream:
    """What a model with this tokenizer is evaluated on: the held-out documents of a folder that `prepare` made, or all
    of the text of another source. `key` is what an error blames."""
    folder = Path(source).expanduser()
    if not _is_prepared(folder, key):
        return text_cache.whole(source, tokenizer, cache_dir, key).stream("validation")
    prepared = open_prepared(folder, key)
    if prepared.tokenizer.fingerprint != tokenizer.fingerprint:
        raise UserError(
            f"{key}: must be of the run's tokenizer ({tokenizer.fingerprint[:12]}), got {source} of "
            f"{prepared.tokenizer.fingerprint[:12]}; prepare the text with the tokenizer.json of the run"
        )
    return prepared.stream("validation")


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
    """The text of `source` as prepared tokens of the cache, split in two."""
    name, fraction = data.tokenizer or "bytes", data.validation_fraction
    text = Text(
        source,
        read_documents(source),
        {"validation_fraction": fraction},
        lambda documents: dict(zip(SPLITS, split_documents(documents, fraction), strict=True)),
    )
    return text_cache.tokenized(text, name, _given_tokenizer(name, vocab), vocab, data.cache_dir)


def _given_tokenizer(name: str, vocab: int) -> Tokenizer | None:
    """The tokenizer that a config names, or None for one that is to be trained; its ids fit into the vocabulary."""
    tokenizer = None
    needed = MIN_BPE_VOCAB
    if name != "bpe":
        tokenizer = ByteTokenizer() if name == "bytes" else load_tokenizer(name)
        needed = tokenizer.size
    _check_vocab(vocab, name, needed, needed)
    return tokenizer
