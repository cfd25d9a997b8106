"""A trained model as it is used: the newest checkpoint of a run, on the devices here, as it is or folded."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from angpt_jax import cli, experiment, fold, rules, run_dir, sharding, weights_folder
from angpt_jax.arch import Arch, Sizes
from angpt_jax.config import Config, MeshConfig
from angpt_jax.data.tokenizer import Tokenizer
from angpt_jax.data.tokenizer_files import load_tokenizer
from angpt_jax.errors import UserError
from angpt_jax.model import Decoder
from angpt_jax.restore import newest_params


@dataclass(frozen=True)
class Trained:
    """What came out of a run.

    Args:
        step: of the checkpoint
        config: of the run, resolved; its mesh is the one here
        model: the decoder, whose `arch` is a plain one if it was folded
        params: float32, lying as the mesh says
        tokenizer: of the run
        run_config: of the run, resolved, as it was trained
    """

    step: int
    config: Config
    model: Decoder
    params: Any
    tokenizer: Tokenizer
    run_config: Config

    @property
    def context(self) -> int:
        """Tokens of a window, which the model was trained on."""
        return self.config.model.context

    @property
    def is_folded(self) -> bool:
        """Whether `model` is the plain decoder that is as good as that of the run."""
        return self.model.arch != experiment.architecture(self.config.model)[0]


def load(directory: Path, mesh: MeshConfig, folded: bool | None = False, compute_dtype: str | None = None) -> Trained:
    """The model of the newest checkpoint that is whole in a run directory, or in a folder of weights alone. Of a
    checkpoint of a run only the parameters are read.

    Args:
        directory: of the run
        mesh: how it lies on the devices here
        folded: whether its parameters are folded (`angpt_jax.fold`); None where its architecture can be. What was
            saved folded is folded in any case
        compute_dtype: of the products, in place of that of the run
    """
    was_folded = weights_folder.is_folded(directory)
    run_config, arch, sizes = config_of(directory)
    config = _as_used(run_config, mesh, compute_dtype)
    cli.raise_problems(rules.check(config, jax.device_count(), sharding.slice_count(jax.devices())))
    obstacles = list(fold.obstacles(arch, config.model.tied_embeddings))
    if folded and obstacles:
        raise UserError(
            f"fold: {arch.name} can't be written as a plain decoder ({'; '.join(obstacles)}), got true; false"
        )
    tokenizer = tokenizer_of(directory)
    _check_vocab(directory, tokenizer, config.model.vocab)
    experiment.keep_compiled(config.data)
    built = experiment.build(config, fold.plain(arch) if was_folded else arch, sizes)
    found = newest_params(run_dir.checkpoints_of(directory), built.abstract.params)
    if found is None:
        raise UserError(f"run.dir: holds no checkpoint, got {str(directory)!r}; train it first")
    weights_folder.check(directory, was_folded, found.data)
    model, params = built.model, found.state
    if not was_folded and (folded or (folded is None and not obstacles)):
        model, params = fold_in(model, params)
    return Trained(found.step, config, model, params, tokenizer, run_config)


def config_of(directory: Path, field: str = "run.dir") -> tuple[Config, Arch, Sizes]:
    """The config of a run, resolved, and what it describes; a UserError where it is none any more. `field` is what an
    error blames."""
    config = run_dir.load_config(directory)
    with _blaming(directory, field):
        cli.raise_problems(rules.check(config))
        return experiment.resolved(config)


@contextmanager
def _blaming(directory: Path, field: str) -> Iterator[None]:
    """Says whose config it is that does not hold."""
    try:
        yield
    except UserError as error:
        raise UserError(
            *(f"{field}: has a config.yaml that does not hold, got {str(directory)!r} ({p})" for p in error.problems)
        ) from error


def tokenizer_of(directory: Path) -> Tokenizer:
    """The tokenizer that a run keeps."""
    return load_tokenizer(str(directory / run_dir.TOKENIZER), "run.dir", "the file that the run kept; bring it back")


def _check_vocab(directory: Path, tokenizer: Tokenizer, vocab: int) -> None:
    if tokenizer.size > vocab:
        raise UserError(
            f"run.dir: has a tokenizer that is not its own, got {str(directory)!r} with {tokenizer.size} entries and "
            f"model.vocab {vocab}; bring the right {run_dir.TOKENIZER} back"
        )


def _as_used(config: Config, mesh: MeshConfig, compute_dtype: str | None) -> Config:
    """The config of a run without what only training needs: any mesh can have one row a device."""
    return replace(
        config,
        model=replace(config.model, attention="auto", compute_dtype=compute_dtype or config.model.compute_dtype),
        optim=replace(config.optim, micro_batches=1),
        data=replace(config.data, batch_size=jax.device_count()),
        mesh=mesh,
    )


def fold_in(model: Decoder, params: Any) -> tuple[Decoder, Any]:
    """The plain decoder and its parameters; there must be no `fold.obstacles`."""
    params = jax.jit(partial(fold.folded, model.arch, model.sizes))(params)
    if not all(bool(jnp.isfinite(leaf).all()) for leaf in jax.tree.leaves(params)):
        raise UserError("fold: an alpha of exactly 1 forgets the stream, which plain sums can't, got true; false")
    return model.clone(arch=fold.plain(model.arch)), params
