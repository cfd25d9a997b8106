"""A folder of prepared tokens: its manifest, and what is checked before a token of it is read."""

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from angpt_jax import json_text
from angpt_jax.data.shards import SUFFIX, Format, Shard, TokenStream, checksum
from angpt_jax.data.tokenizer import ByteTokenizer, Tokenizer
from angpt_jax.data.tokenizer_files import load_tokenizer
from angpt_jax.errors import StorageError, UserError
from angpt_jax.files import write_whole

MANIFEST = "manifest.json"
TOKENIZER = "tokenizer.json"  # not there for bytes
VERSION = 1
CHECKED = 2**30  # bytes of shards whose checksums are compared whenever they are opened
_IDS_AT_ONCE = 1 << 22
DTYPES = ("uint16", "uint32")
SPLITS = ("train", "validation")
Facts = dict[str, Any]


@dataclass(frozen=True)
class Manifest:
    """What a folder of prepared tokens holds.

    Args:
        format: of the shards
        dtype: of the ids
        tokenizer: kind (bytes, bpe or file), fingerprint, size, end_of_document
        source: where the text is from: name, kind, fingerprint and what else `prepare` noted
        splits: shards of train and validation, in their order
    """

    format: Format
    dtype: str
    tokenizer: Facts
    source: Facts
    splits: dict[str, tuple[Shard, ...]]

    @classmethod
    def of(
        cls, format: Format, tokenizer: Tokenizer, kind: str, source: Facts, splits: dict[str, tuple[Shard, ...]]
    ) -> "Manifest":
        """The manifest of shards that `tokenizer` made; `kind` is bytes, bpe (trained for them) or file."""
        facts = {"kind": kind, "fingerprint": tokenizer.fingerprint, "size": tokenizer.size}
        return cls(format, tokenizer.dtype, facts | {"end_of_document": tokenizer.end_of_document}, source, splits)

    def to_json(self) -> str:
        splits = {
            name: {
                "documents": sum(shard.documents for shard in shards),
                "tokens": sum(shard.tokens for shard in shards),
                "text_bytes": sum(shard.text_bytes for shard in shards),
                "shards": [dataclasses.asdict(shard) for shard in shards],
            }
            for name, shards in self.splits.items()
        }
        facts = {"format": self.format, "dtype": self.dtype, "tokenizer": self.tokenizer, "source": self.source}
        return json.dumps({"version": VERSION, **facts, "splits": splits}, indent=1) + "\n"

    @classmethod
    def from_json(cls, text: str) -> "Manifest":
        """A ValueError (KeyError, TypeError) for anything that `to_json` does not write."""
        facts = json_text.parsed(text)
        if facts["version"] != VERSION:
            raise ValueError(f"version {facts['version']}, this program reads version {VERSION}")
        if facts["format"] not in SUFFIX or facts["dtype"] not in DTYPES:
            raise ValueError(f"shards of {facts['format']} {facts['dtype']}, which this program does not read")
        tokenizer = {name: facts["tokenizer"][name] for name in ("kind", "fingerprint", "size", "end_of_document")}
        splits = {name: tuple(Shard.read(shard) for shard in facts["splits"][name]["shards"]) for name in SPLITS}
        manifest = cls(facts["format"], facts["dtype"], tokenizer, facts["source"], splits)
        manifest.check()
        return manifest

    def check(self) -> None:
        """A ValueError (TypeError) if the facts are of other types, or can't be true together."""
        for name, kind in (("kind", str), ("fingerprint", str), ("size", int), ("end_of_document", int)):
            if type(self.tokenizer[name]) is not kind:
                raise ValueError(f"tokenizer {name} {self.tokenizer[name]!r} where {kind.__name__} is due")
        size, width = self.tokenizer["size"], np.dtype(self.dtype).itemsize
        if size > 256**width:
            raise ValueError(f"{self.dtype} ids are too narrow for the {size} ids of its tokenizer")
        for shard in (shard for shards in self.splits.values() for shard in shards):
            if self.format == "memmap" and shard.bytes != shard.tokens * width:
                raise ValueError(f"{shard.file} of {shard.bytes} bytes for {shard.tokens} {self.dtype} ids")
            if shard.largest_id >= size:
                raise ValueError(f"{shard.file} with id {shard.largest_id}, its tokenizer has {size} ids")


@dataclass(frozen=True)
class Prepared:
    """An opened folder: the tokenizer, the two streams, and what decides which tokens they are."""

    folder: Path
    manifest: Manifest
    tokenizer: Tokenizer

    def stream(self, split: Literal["train", "validation"]) -> TokenStream:
        manifest = self.manifest
        end = self.tokenizer.end_of_document
        return TokenStream(str(self.folder), manifest.format, manifest.dtype, end, manifest.splits[split])


def is_prepared(folder: Path) -> bool:
    return (folder / MANIFEST).is_file()


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """The last thing that is written: it says that the shards are there."""
    write_whole(folder / MANIFEST, manifest.to_json())


def open_prepared(folder: Path, key: str, *, check_all: bool = False) -> Prepared:
    """The prepared tokens in `folder`; a UserError under `key` names the file that is missing, damaged or not theirs.

    Sizes are always compared, checksums if the shards are small (CHECKED) or `check_all` is set.
    """
    manifest = _read_manifest(folder, key)
    tokenizer = _read_tokenizer(folder, manifest, key)
    shards = [shard for split in SPLITS for shard in manifest.splits[split]]
    compare = check_all or sum(shard.bytes for shard in shards) <= CHECKED
    problems = [problem for shard in shards if (problem := damage(folder, shard, compare))]
    if compare and manifest.format == "memmap" and not problems:
        problems = [problem for shard in shards if (problem := _too_large(folder / shard.file, shard, manifest.dtype))]
    if problems:
        raise UserError(
            *(f"{key}: {problem}, got {folder}; run prepare again, it keeps what is whole" for problem in problems)
        )
    return Prepared(folder, manifest, tokenizer)


def _read_manifest(folder: Path, key: str) -> Manifest:
    try:
        return Manifest.from_json((folder / MANIFEST).read_text("utf-8"))
    except OSError as error:
        raise StorageError(
            f"{key}: {MANIFEST} can't be read ({error.strerror}), got {folder}; a folder that prepare made"
        ) from error
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(
            f"{key}: {MANIFEST} is not one of prepare's ({error}), got {folder}; run prepare again"
        ) from error


def _read_tokenizer(folder: Path, manifest: Manifest, key: str) -> Tokenizer:
    is_bytes = manifest.tokenizer["kind"] == "bytes"
    tokenizer = ByteTokenizer() if is_bytes else load_tokenizer(str(folder / TOKENIZER), key)
    if tokenizer.fingerprint != manifest.tokenizer["fingerprint"]:
        raise UserError(
            f"{key}: {TOKENIZER} is not the tokenizer that made the tokens ({tokenizer.fingerprint[:12]}, the manifest "
            f"says {manifest.tokenizer['fingerprint'][:12]}), got {folder}; bring it back, or run prepare again"
        )
    return tokenizer


def _too_large(path: Path, shard: Shard, dtype: str) -> str | None:
    """What is wrong with the ids of a file that is small enough to be read whole: with larger ones, and those of
    ArrayRecord, it comes out where they are read."""
    with path.open("rb") as file:
        position = 0
        while len(ids := np.fromfile(file, dtype, _IDS_AT_ONCE)):
            if ids.max() > shard.largest_id:
                place = int(np.argmax(ids > shard.largest_id))
                most = f"{MANIFEST} says at most {shard.largest_id}"
                return f"{shard.file} holds id {ids[place]} at position {position + place}, {most}"
            position += len(ids)
    return None


def damage(folder: Path, shard: Shard, compare: bool) -> str | None:
    """What is wrong with a shard in a folder, if anything is; its checksum is compared if `compare`."""
    path = folder / shard.file
    try:
        size = path.stat().st_size
        if size != shard.bytes:
            return f"{shard.file} holds {size} bytes where {shard.bytes} were written"
        if compare and checksum(path) != shard.sha256:
            return f"{shard.file} is not what was written (its checksum differs)"
    except FileNotFoundError:
        return f"{shard.file} is missing"
    except OSError as error:
        return f"{shard.file} can't be read ({error.strerror})"
    return None
