"""`python -m angpt_jax.prepare`: text, JSONL, Parquet and other data to a folder of token ids, ready to train on."""

import os
from dataclasses import dataclass
from pathlib import Path

from angpt_jax import cli, path_rules
from angpt_jax.data.build import build
from angpt_jax.data.plans import checked_manifest, facts_of, sample_texts
from angpt_jax.data.prepared import Prepared, open_prepared
from angpt_jax.data.shards import Format
from angpt_jax.data.sources import Source, changed, find_source
from angpt_jax.data.tokenizer import MIN_BPE_VOCAB, ByteTokenizer, FileTokenizer, Tokenizer, train_bpe
from angpt_jax.data.tokenizer_files import load_tokenizer
from angpt_jax.data.units import Unit, cut
from angpt_jax.data.work import Plan
from angpt_jax.data.workspace import Workspace
from angpt_jax.errors import UserError
from angpt_jax.stopping import StopRequest
from angpt_jax.unit_progress import UnitProgress

STOPPED = 75  # exit code
MEGABYTE = 1_000_000


@dataclass(frozen=True)
class PrepareConfig:
    """Text to token ids on disk.

    Args:
        out: folder for the tokens; one that is unfinished is gone on with
        source: text file, JSONL (.jsonl, .ndjson, .json lines, also .gz and .zst), Parquet, a folder of such files, a
            data set saved with save_to_disk, a TFDS data set (tfds:NAME, tfds:NAME@SPLIT or its folder), or stdlib
        tokenizer: bytes, or the path of a byte-level tokenizer.json or of a SentencePiece .model
        train_tokenizer: ids of a byte-level BPE to train on the text, in place of tokenizer
        format: of the shards, memmap (plain ids) or array_record
        validation_source: data that are all held out, found like source
        validation_fraction: share of the documents that is held out where there is no validation_source
        field: that holds the text, where documents have fields
        skip_bad_lines: broken lines and rows to pass over, at most, in all
        workers: processes; null is one a core
        unit_mb: megabytes of input that make up one shard
        verify: only check the folder that is there, with all checksums
    """

    out: str
    source: str | None = None
    tokenizer: str = "bytes"
    train_tokenizer: int | None = None
    format: Format = "memmap"
    validation_source: str | None = None
    validation_fraction: float = 0.005
    field: str = "text"
    skip_bad_lines: int = 0
    workers: int | None = None
    unit_mb: int = 64
    verify: bool = False


def prepare(config: PrepareConfig, name: str) -> int:
    """Makes or checks the folder; returns the exit code."""
    cli.raise_problems(check(config))
    folder = Path(config.out).expanduser().absolute()
    if config.verify:
        print(f"{folder} is whole: {_contents(open_prepared(folder, 'out', check_all=True))}")
        return 0
    assert config.source is not None
    sources = [find_source(config.source, "source", config.field, "train")]
    if config.validation_source is not None:
        sources.append(find_source(config.validation_source, "validation_source", config.field, "validation"))
    given = _given_tokenizer(config)
    made_by = given.fingerprint if given else f"bpe {config.train_tokenizer}"
    facts = facts_of(sources, config.validation_fraction, made_by, config.format, config.unit_mb)
    workspace = Workspace(folder, facts)
    workspace.check()
    units = _units(config, sources)
    workspace.load()
    if len(workspace.done) == len(units) and (finished := workspace.finished()):
        workspace.discard()
        print(f"already prepared: {folder}, {_contents(finished)}")
        return 0
    return _make(config, workspace, sources, units, given)


def _make(
    config: PrepareConfig, workspace: Workspace, sources: list[Source], units: list[Unit], given: Tokenizer | None
) -> int:
    """All that writes; returns the exit code."""
    with workspace.opened():
        tokenizer = given or _trained_tokenizer(config, workspace, units)
        plan = Plan(tuple(units), tokenizer, config.format, config.validation_fraction, config.skip_bad_lines)
        with UnitProgress([unit.size for unit in units], workspace.done) as progress, StopRequest() as stop:
            all_done = build(
                plan,
                workspace.unfinished,
                workspace.done,
                _workers(config),
                report=progress.update,
                stop=lambda: stop.received is not None,
            )
        if not all_done:
            there = f"{len(workspace.done)} of {len(units)} units are done"
            print(f"stopped by {stop.received}: {there}; run the same command again to go on")
            return STOPPED
        try:
            if names := changed(sources):
                raise UserError(f"source: changed while it was read, got {', '.join(names[:3])}; run again")
            manifest = checked_manifest(plan, workspace.done, sources, _kind(config))
        except UserError:
            workspace.done.clear()  # none of it is of use
            raise
        workspace.finish(manifest, tokenizer if isinstance(tokenizer, FileTokenizer) else None)
    contents = _contents(open_prepared(workspace.folder, "out"))
    print(f"prepared {workspace.folder}: {contents}; {progress.rate()}")
    return 0


def check(config: PrepareConfig) -> list[str]:
    """Problems of the values themselves."""
    problems = [
        f"{key}: must be at least {least}, got {value}"
        for key, value, least in (
            ("train_tokenizer", config.train_tokenizer, MIN_BPE_VOCAB),
            ("skip_bad_lines", config.skip_bad_lines, 0),
            ("workers", config.workers, 1),
            ("unit_mb", config.unit_mb, 1),
        )
        if value is not None and value < least
    ]
    if not 0 < config.validation_fraction < 1:
        problems.append(f"validation_fraction: must be > 0 and < 1, got {config.validation_fraction}")
    paths = ("out", config.out), ("source", config.source), ("validation_source", config.validation_source)
    for key, path in (*paths, ("tokenizer", config.tokenizer)):
        problems += path_rules.of_path(key, path)
        if path == "":
            problems.append(f"{key}: must be a path, got ''")
    if config.train_tokenizer is not None and config.tokenizer != "bytes":
        problems.append(f"train_tokenizer: can't be given together with tokenizer, got {config.tokenizer}; one of them")
    if config.verify:
        return problems
    if config.source is None:
        problems.append("source: needed, got null; a path, or --verify true to check what is there")
    for key, path in paths[1:]:
        if path is not None and _is_inside(config.out, path):
            problems.append(f"out: must not lie in {key}, got {config.out}; a folder elsewhere")
    return problems


def _is_inside(inner: str, outer: str) -> bool:
    return Path(inner).expanduser().resolve().is_relative_to(Path(outer).expanduser().resolve())


def _given_tokenizer(config: PrepareConfig) -> Tokenizer | None:
    if config.train_tokenizer is not None:
        return None
    return ByteTokenizer() if config.tokenizer == "bytes" else load_tokenizer(config.tokenizer, "tokenizer")


def _trained_tokenizer(config: PrepareConfig, workspace: Workspace, units: list[Unit]) -> Tokenizer:
    tokenizer = workspace.tokenizer()
    if tokenizer is None:
        assert config.train_tokenizer is not None
        print(f"training a tokenizer of {config.train_tokenizer} ids", flush=True)
        tokenizer = train_bpe(sample_texts(units, config.validation_fraction), config.train_tokenizer)
        workspace.save_tokenizer(tokenizer)
    return tokenizer


def _units(config: PrepareConfig, sources: list[Source]) -> list[Unit]:
    unit_bytes, fraction = config.unit_mb * MEGABYTE, config.validation_fraction
    if len(sources) == 1:
        return cut(sources[0], unit_bytes, None, fraction)
    return [*cut(sources[0], unit_bytes, "train", fraction), *cut(sources[1], unit_bytes, "validation", fraction)]


def _workers(config: PrepareConfig) -> int:
    return config.workers or len(os.sched_getaffinity(0))


def _kind(config: PrepareConfig) -> str:
    if config.train_tokenizer is not None:
        return "bpe"
    return "bytes" if config.tokenizer == "bytes" else "file"


def _contents(prepared: Prepared) -> str:
    return ", ".join(
        f"{sum(shard.documents for shard in shards):,} {split} documents "
        f"({sum(shard.tokens for shard in shards):,} tokens)"
        for split, shards in prepared.manifest.splits.items()
    )


if __name__ == "__main__":
    cli.main(prepare, PrepareConfig, command="prepare", default_config=None)
