"""One unit: its documents are read, tokenized and written as at most one shard a side, with a sidecar that says so."""

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from angpt_jax.data.corpus import name_hash
from angpt_jax.data.readers import Bad, Piece, read
from angpt_jax.data.shards import SUFFIX, Format, Shard, ShardWriter
from angpt_jax.data.tokenizer import Tokenizer
from angpt_jax.data.units import Side, Unit
from angpt_jax.errors import StorageError, UserError
from angpt_jax.files import write_whole

_CHARACTERS_AT_ONCE = 1 << 19
_PIECES_AT_ONCE = 1024


@dataclass(frozen=True)
class Plan:
    """What is made of what.

    Args:
        units: by number
        tokenizer: of the ids
        format: of the shards
        fraction: of the documents that is held out, where no unit says it
        skip_bad_lines: most bad lines and rows that are passed over
    """

    units: tuple[Unit, ...]
    tokenizer: Tokenizer
    format: Format
    fraction: float
    skip_bad_lines: int


@dataclass
class Done:
    """What became of a unit.

    Args:
        shards: by side, at most one each
        text: sha256 of names and texts
        empty: documents without text, left out
        bad: lines and rows that were passed over
        first_bad: the first of them
        hashes: smallest and largest of the names' hashes
    """

    shards: dict[Side, Shard] = field(default_factory=dict)
    text: str = ""
    empty: int = 0
    bad: int = 0
    first_bad: str = ""
    hashes: tuple[float, float] = (2.0, -1.0)

    @classmethod
    def from_facts(cls, facts: dict[str, Any]) -> "Done":
        shards = {side: Shard.read(shard) for side, shard in facts["shards"].items()}
        return cls(**{**facts, "shards": shards, "hashes": tuple(facts["hashes"])})

    @property
    def text_bytes(self) -> int:
        return sum(shard.text_bytes for shard in self.shards.values())


class Stopped(Exception):
    """Asked to stop in the middle of a unit."""


def sidecar(folder: Path, number: int) -> Path:
    return folder / f"{number:05}.json"


def make(plan: Plan, folder: Path, number: int, stopped: Callable[[], bool]) -> Done:
    """Shards and sidecar of one unit; the sidecar comes last and says that they are there."""
    try:
        with _Shards(plan, folder, number) as shards:
            done = _tokenize(plan, plan.units[number], shards, stopped)
            done.shards = shards.close()
        write_whole(sidecar(folder, number), json.dumps(asdict(done)))
    except OSError as error:
        raise StorageError(
            f"out: can't be written ({error.strerror}), got {folder.parent}; a folder that this user may write, on a "
            "disk with room; what is finished stays, run again"
        ) from error
    return done


def _tokenize(plan: Plan, unit: Unit, shards: "_Shards", stopped: Callable[[], bool]) -> Done:
    done, digest = Done(), hashlib.sha256()
    for batch in _batches(_good(read(unit), done, plan.skip_bad_lines)):
        if stopped():
            raise Stopped
        for piece, ids in zip(batch, plan.tokenizer.encode([piece.text for piece in batch]), strict=True):
            text, name = piece.text.encode(), piece.name.encode("utf-8", "surrogateescape")
            if plan.tokenizer.byte_lengths[ids].sum() != len(text):
                raise UserError(
                    f"tokenizer: does not give back the text, got {piece.name}; a byte-level tokenizer that keeps "
                    "every character"
                )
            place = name_hash(piece.name)
            done.hashes = min(done.hashes[0], place), max(done.hashes[1], place)
            digest.update(b"\xff" + name + b"\xff" + text if piece.begins else text)
            side: Side = unit.side or ("validation" if place < plan.fraction else "train")
            shards.of(side).add(ids, len(text), piece.begins)
    done.text = digest.hexdigest()
    return done


def _good(found: Iterable[Piece | Bad], done: Done, most: int) -> Iterator[Piece]:
    """The documents with text; the others are counted."""
    for one in found:
        if isinstance(one, Bad):
            done.bad, done.first_bad = done.bad + 1, done.first_bad or one.problem
            if done.bad > most:
                raise UserError(one.problem, *too_many(done.bad, most))
        elif one.text:
            yield one
        else:
            done.empty += one.begins


def _batches(pieces: Iterator[Piece]) -> Iterator[list[Piece]]:
    """As much as is encoded at once."""
    batch: list[Piece] = []
    characters = 0
    for piece in pieces:
        batch.append(piece)
        characters += len(piece.text)
        if characters >= _CHARACTERS_AT_ONCE or len(batch) == _PIECES_AT_ONCE:
            yield batch
            batch, characters = [], 0
    if batch:
        yield batch


class _Shards:
    """The shards of one unit; those that are not closed are discarded."""

    def __init__(self, plan: Plan, folder: Path, number: int):
        self._name = str(folder / f"{{}}-{number:05}.{SUFFIX[plan.format]}")
        self._plan = plan
        self._writers: dict[Side, ShardWriter] = {}

    def __enter__(self) -> "_Shards":
        return self

    def __exit__(self, *exception: Any) -> None:
        for writer in self._writers.values():
            writer.discard()

    def of(self, side: Side) -> ShardWriter:
        if side not in self._writers:
            plan = self._plan
            path = Path(self._name.format(side))
            self._writers[side] = ShardWriter(path, plan.format, plan.tokenizer.dtype, plan.tokenizer.end_of_document)
        return self._writers[side]

    def close(self) -> dict[Side, Shard]:
        return {side: writer.close() for side, writer in sorted(self._writers.items())}


def too_many(count: int, most: int) -> list[str]:
    return [f"skip_bad_lines: at least {count} bad lines, got {most}"] if most else []
