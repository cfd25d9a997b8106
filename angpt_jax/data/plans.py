"""What decides the output of `prepare`, the sample that a tokenizer is trained on, and the manifest of the result."""

import hashlib
import json
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import tokenizers

from angpt_jax.data.corpus import name_hash
from angpt_jax.data.prepared import SPLITS, VERSION, Manifest
from angpt_jax.data.readers import Piece, read
from angpt_jax.data.shards import Format
from angpt_jax.data.sources import Source
from angpt_jax.data.units import Unit
from angpt_jax.data.work import Done, Plan
from angpt_jax.errors import UserError

_SAMPLE = 100_000_000  # characters that a tokenizer is trained on, at most
_SAMPLED_UNITS = 64
Facts = dict[str, Any]


def facts_of(sources: Sequence[Source], fraction: float, tokenizer: str, format: Format, unit_mb: int) -> Facts:
    """By the names of the config's fields: equal facts give equal bytes."""
    source, *validation = sources
    return {
        "version": [VERSION, tokenizers.__version__],
        "source": _source_facts(source),
        "validation_source": _source_facts(validation[0]) if validation else None,
        "validation_fraction": None if validation else fraction,
        "field": source.field,
        "tokenizer": tokenizer,
        "format": format,
        "unit_mb": unit_mb,
    }


def _source_facts(source: Source) -> list[str]:
    files = [[file.name, file.size, file.modified] for file in source.files]
    return [source.kind, source.split, hashlib.sha256(json.dumps(files).encode()).hexdigest()]


def sample_texts(units: Sequence[Unit], fraction: float) -> Iterator[str]:
    """Training text from all over the units, the same for the same units; all of it where there is little."""
    units = [unit for unit in units if unit.side != "validation"]
    count = min(len(units), _SAMPLED_UNITS)
    for unit in (units[number * len(units) // count] for number in range(count)):
        left = _SAMPLE // count
        for piece in read(unit):
            if isinstance(piece, Piece) and (unit.side == "train" or name_hash(piece.name) >= fraction):
                yield piece.text
                left -= len(piece.text)
                if left <= 0:
                    break


def checked_manifest(plan: Plan, done: dict[int, Done], sources: Sequence[Source], kind: str) -> Manifest:
    """The manifest of finished units; a UserError if a side has no document."""
    shards = {
        side: tuple(done[number].shards[side] for number in sorted(done) if side in done[number].shards)
        for side in SPLITS
    }
    if not all(shards.values()):
        raise UserError(_empty_side(plan, done, sources, bool(shards["train"]), bool(shards["validation"])))
    facts = _described(plan, done, sources[0])
    if len(sources) > 1:
        facts["validation_source"] = _described(plan, done, sources[1])
    else:
        facts["validation_fraction"] = plan.fraction
    return Manifest.of(plan.format, plan.tokenizer, kind, facts, shards)


def _described(plan: Plan, done: dict[int, Done], source: Source) -> Facts:
    of = [done[number] for number in sorted(done) if plan.units[number].source == source]
    return {
        "name": Path(source.name).name or source.name,
        "kind": source.kind,
        "fingerprint": hashlib.sha256("".join(unit.text for unit in of).encode()).hexdigest(),
        "files": len(source.files),
        "bytes": sum(file.size for file in source.files),
        "empty_documents": sum(unit.empty for unit in of),
        "bad_lines": sum(unit.bad for unit in of),
    }


def _empty_side(plan: Plan, done: dict[int, Done], sources: Sequence[Source], train: bool, validation: bool) -> str:
    left_out = f"{sum(unit.empty for unit in done.values())} empty and {sum(unit.bad for unit in done.values())} bad"
    if not train and not validation:
        return f"source: empty, got {sources[0].name} ({left_out} documents); documents with text in them"
    if len(sources) > 1:
        key, name = ("validation_source", sources[1].name) if train else ("source", sources[0].name)
        return f"{key}: empty, got {name} ({left_out} documents in all); documents with text in them"
    smallest = min(unit.hashes[0] for unit in done.values())
    largest = max(unit.hashes[1] for unit in done.values())
    if smallest == largest:
        return f"source: holds one document, got {sources[0].name}; several documents, or a --validation_source"
    side = "validation" if train else "training"
    would_do = _above(smallest) if train and _above(smallest) <= largest else (smallest + largest) / 2
    return (
        f"validation_fraction: leaves no {side} documents, got {plan.fraction}; {would_do:.15g} would do, "
        "or a --validation_source"
    )


def _above(number: float) -> float:
    """The next number of two digits."""
    digits = 1 - math.floor(math.log10(number)) if number > 0 else 2
    return math.floor(number * 10**digits + 1) / 10**digits
