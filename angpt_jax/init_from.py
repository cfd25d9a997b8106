"""The weights that a new run starts from: those of another run, of a folder of weights alone, or of an export
(`run.init_from`).

    check(config, arch, sizes, tokenizer, directory, group)     # before anything is compiled or written
    params = read(config, directory, abstract, group)           # None: the run goes on from a checkpoint, or draws them

What does not fit is refused: other sizes, another architecture, another tokenizer, folded weights.
"""

import json
from dataclasses import asdict, dataclass, fields, replace
from functools import partial
from pathlib import Path
from typing import Any

import jax

from angpt_jax import run_dir, trained, weights_folder
from angpt_jax.arch import Arch, Sizes
from angpt_jax.config import Config
from angpt_jax.data.tokenizer import Tokenizer
from angpt_jax.data.tokenizer_files import load_tokenizer
from angpt_jax.errors import UserError
from angpt_jax.exports import reading
from angpt_jax.exports.exported import with_vocab
from angpt_jax.processes.group import Group
from angpt_jax.restore import SHOWN, newest_params, steps_in
from angpt_jax.step import is_finite

FIELD = "run.init_from"
KEPT = "the file that the run kept, or none"
OF_TRAINING = {"name", "init", "constraint", "optimizer"}  # what of an architecture is not in the function of a model


def check(config: Config, arch: Arch, sizes: Sizes, tokenizer: Tokenizer, directory: Path, group: Group) -> None:
    """Refuses, in all processes, what can be told without the weights themselves. All is that of the new run."""
    source = _source(config, directory, group, "check")
    if source is not None:
        group.agreed(FIELD, partial(_check, source, config, arch, sizes, tokenizer))


def read(config: Config, directory: Path, abstract: Any, group: Group) -> Any:
    """The parameters that the run in `directory` starts from, in the shapes and shardings of `abstract`; None if it
    does not start from any."""
    source = _source(config, directory, group, "read")
    if source is None:
        return None
    of_kind = _of_export if reading.is_export(source) else _of_checkpoint
    params = of_kind(source, abstract, group)
    if not is_finite(params):
        raise UserError(f"{FIELD}: holds numbers that are not finite, got {str(source)!r}; another one")
    return params


def recorded(config: Config, directory: Path) -> Config:
    """The config as the run directory keeps it: a run that has checkpoints started from what it once started from."""
    if not steps_in(run_dir.checkpoints_of(directory)):
        return config
    before = run_dir.load_config(directory).run.init_from
    return replace(config, run=replace(config.run, init_from=before))


def _source(config: Config, directory: Path, group: Group, what: str) -> Path | None:
    """Where the weights are; None if none are asked for, or the run has checkpoints, as process 0 sees it."""
    if config.run.init_from is None:
        return None
    has_some = group.is_first and bool(steps_in(run_dir.checkpoints_of(directory)))
    is_new = not json.loads(group.everyone(f"{FIELD}: {what}", json.dumps(has_some))[0])
    return Path(config.run.init_from) if is_new else None


def _of_export(source: Path, abstract: Any, group: Group) -> Any:
    """The parameters of an export, which has no padded vocabulary entries; each process reads all of them."""
    read = group.agreed(FIELD, partial(reading.read_export, source, FIELD))
    exported = with_vocab(read, abstract["embedding"].shape[0])
    group.say(f"starts from the weights of step {exported.step} in {source}")
    return jax.tree.map(
        lambda wanted, leaf: jax.make_array_from_callback(wanted.shape, wanted.sharding, leaf.__getitem__),
        abstract,
        exported.params,
    )


def _of_checkpoint(source: Path, abstract: Any, group: Group) -> Any:
    """The newest parameters in `source` that are whole."""
    found = newest_params(run_dir.checkpoints_of(source), abstract, group, FIELD)
    if found is None:
        raise UserError(f"{FIELD}: holds no checkpoint, got {str(source)!r}; a run that has saved one")
    weights_folder.check(source, False, found.data, FIELD)
    group.say(f"starts from the weights of step {found.step} in {source}")
    return found.state


@dataclass(frozen=True)
class _Saved:
    """What a source says of its weights; the fingerprint of its tokenizer is None if it has none."""

    arch: Arch
    sizes: Sizes
    tied_embeddings: bool
    folded: bool
    tokenizer: str | None


def _saved_in(source: Path, vocab: int) -> _Saved:
    """`vocab` is that of the new run: an export has no padded entries, and can have more of them."""
    if reading.is_export(source):
        of = reading.read_description(source, FIELD)
        sizes = replace(of.sizes, vocab=max(of.sizes.vocab, vocab))
        return _Saved(of.arch, sizes, of.model.tied_embeddings, of.folded, of.tokenizer)
    if not run_dir.holds_run(source):
        raise UserError(
            f"{FIELD}: holds no weights (no config.yaml or config.json), got {str(source)!r}; a run directory, or a "
            "folder that export wrote"
        )
    folded = weights_folder.is_folded(source, FIELD)
    config, arch, sizes = trained.config_of(source, FIELD)
    return _Saved(arch, sizes, config.model.tied_embeddings, folded, _fingerprint(source / run_dir.TOKENIZER))


def _fingerprint(path: Path) -> str | None:
    return load_tokenizer(str(path), FIELD, KEPT).fingerprint if path.exists() else None


def _check(source: Path, ours: Config, arch: Arch, sizes: Sizes, tokenizer: Tokenizer) -> None:
    saved = _saved_in(source, sizes.vocab)
    if saved.folded:
        raise UserError(
            f"{FIELD}: holds folded weights, which are of another architecture, got {str(source)!r}; weights that are "
            "not folded"
        )
    wanted = _Saved(arch, sizes, ours.model.tied_embeddings, False, tokenizer.fingerprint)
    different = _differences(saved, wanted)
    if different:
        more = f"; and {len(different) - SHOWN} more" if len(different) > SHOWN else ""
        raise UserError(
            f"{FIELD}: its model is not that of this run, got {str(source)!r}, which differs in "
            f"{'; '.join(different[:SHOWN])}{more}; use its model, or no --{FIELD}"
        )
    if saved.tokenizer not in (None, wanted.tokenizer):  # ids must mean what they meant
        raise UserError(
            f"{FIELD}: its tokenizer is not that of this run, got {str(source)!r}; give that as data.tokenizer "
            f"(prepare takes it as --tokenizer), or no --{FIELD}"
        )


def _differences(saved: _Saved, wanted: _Saved) -> list[str]:
    """What makes other weights, or another function of the same: sizes, or, where they agree, what fills the places.
    How long a window is, how weights are drawn and what they are held to may differ."""
    before, after = (
        asdict(replace(of.sizes, kv_heads=of.sizes.key_value_heads)) | {"tied_embeddings": of.tied_embeddings}
        for of in (saved, wanted)
    )
    old, new = saved.arch, wanted.arch
    of_sizes = [_difference(name, before[name], after[name]) for name in before if before[name] != after[name]]
    names = [f.name for f in fields(Arch) if f.name not in OF_TRAINING and getattr(old, f.name) != getattr(new, f.name)]
    if of_sizes or not names:
        return of_sizes
    if old.name != new.name:
        return [_difference("arch", old.name, new.name)]
    return [_difference(f"places.{name}", getattr(old, name), getattr(new, name)) for name in names]


def _difference(field: str, saved: object, wanted: object) -> str:
    return f"model.{field} (saved: {saved}, wanted: {wanted})"
