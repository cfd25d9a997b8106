"""A run that nothing speaks against: its config, and all that was made from it before the first step."""

import sys
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import jax

from angpt_jax import cli, experiment, rules, run_dir, sharding
from angpt_jax.arch import Arch, Sizes
from angpt_jax.config import Config
from angpt_jax.data import pipeline
from angpt_jax.data.pipeline import Order
from angpt_jax.data.tokens import Fingerprint, TokenData, cache_root, load_tokens
from angpt_jax.errors import UserError
from angpt_jax.experiment import Experiment


@dataclass(frozen=True)
class Job:
    """A run that nothing speaks against: its resolved config and all that was made from it."""

    config: Config
    arch: Arch
    sizes: Sizes
    built: Experiment
    tokens: TokenData
    directory: Path

    @property
    def last_step(self) -> int:
        return self.config.run.stop_at_step or self.config.run.steps

    @property
    def tokens_per_step(self) -> int:
        return self.config.data.batch_size * self.config.model.context

    @property
    def order(self) -> Order:
        data = self.config.data
        return Order(self.config.model.context, data.batch_size, data.shuffle_seed, data.packing)

    @cached_property
    def data_fingerprint(self) -> Fingerprint:
        """What decides which tokens a step sees."""
        return pipeline.pipeline_fingerprint(self.tokens, self.order)

    def check_data(self, trained_on: Fingerprint) -> None:
        """Refuses, or says, that the data are not those of the steps before."""
        now = self.data_fingerprint
        names = [name for name in trained_on | now if trained_on.get(name) != now.get(name)]
        changed = ", ".join(names)
        if changed and (self.config.data.on_change == "refuse" or any("tokenizer" in name for name in names)):
            raise UserError(
                f"data.source: the data of {self.directory} changed ({changed}), got {self.config.data.source!r}; "
                "bring the old data back, use another --run.dir, or go on with other data by --data.on_change continue"
            )
        if changed:
            print(f"the data changed ({changed}): going on with the new ones", file=sys.stderr)


def assemble(config: Config, name: str) -> Job:
    """Checks what needs JAX or the data, then reads the tokens and builds. Writes nothing but the token cache.

    The rules of `rules.check(config)` are taken to hold.
    """
    config, arch, sizes = experiment.resolved(config)
    cli.raise_problems(rules.check(config, jax.device_count(), sharding.slice_count(jax.devices())))
    directory = run_dir.locate(config, name)
    run_dir.check(directory, config)
    tokens = load_tokens(config.data, config.model.vocab)
    pipeline.check_length(tokens, config.model.context)
    jax.config.update("jax_compilation_cache_dir", str(cache_root(config.data.cache_dir) / "xla"))
    return Job(config, arch, sizes, experiment.build(config, arch, sizes), tokens, directory)
