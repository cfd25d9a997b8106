"""A run that nothing speaks against: its config, and all that was made from it before the first step."""

import json
import sys
from dataclasses import asdict, dataclass, replace
from functools import cached_property, partial
from pathlib import Path

import jax

from angpt_jax import cli, experiment, init_from, rules, run_dir, sharding
from angpt_jax.arch import Arch, Sizes
from angpt_jax.config import Config
from angpt_jax.data import pipeline
from angpt_jax.data.pipeline import Order
from angpt_jax.data.text_cache import Fingerprint
from angpt_jax.data.tokens import TokenData, load_tokens
from angpt_jax.errors import UserError
from angpt_jax.experiment import Experiment
from angpt_jax.processes.group import Group

# What may differ between the processes of a run: where things lie on their machines, and which of them each is.
OF_A_PROCESS = ("data.cache_dir", "data.workers", "distributed.", "run.dir")


@dataclass(frozen=True)
class Job:
    """A run that nothing speaks against: its resolved config and all that was made from it."""

    config: Config
    arch: Arch
    sizes: Sizes
    built: Experiment
    tokens: TokenData
    directory: Path
    group: Group

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
        if changed and self.group.is_first:
            print(f"the data changed ({changed}): going on with the new ones", file=sys.stderr)


def assemble(config: Config, name: str, group: Group) -> Job:
    """Checks what needs JAX or the data, then reads the tokens and builds. Writes nothing but the token cache.

    The rules of `rules.check(config)` are taken to hold. What one process refuses, all refuse.
    """
    check_same_config(config, group)
    config, arch, sizes, directory = group.agreed("config", partial(_resolved, config, name, group.is_first))
    if not config.dry_run:
        run_dir.check_shared(directory, group)
    tokens = group.in_turn("tokens", partial(_load_tokens, config))
    init_from.check(config, arch, sizes, tokens.tokenizer, directory, group)
    experiment.keep_compiled(config.data)
    built = group.agreed("shapes", lambda: experiment.build(config, arch, sizes))
    job = Job(config, arch, sizes, built, tokens, directory, group)
    check_same_data(job)
    return job


def _resolved(config: Config, name: str, looks_there: bool) -> tuple[Config, Arch, Sizes, Path]:
    if config.run.init_from is not None:
        config = replace(config, run=replace(config.run, init_from=str(Path(config.run.init_from).absolute())))
    config, arch, sizes = experiment.resolved(config)
    cli.raise_problems(rules.check(config, jax.device_count(), sharding.slice_count(jax.devices())))
    directory = run_dir.locate(config, name)
    if looks_there:
        run_dir.check(directory, config)
    return config, arch, sizes, directory


def _load_tokens(config: Config) -> TokenData:
    tokens = load_tokens(config.data, config.model.vocab)
    pipeline.check_length(tokens, config.model.context)
    return tokens


def check_same_config(config: Config, group: Group) -> None:
    """Refuses processes that were started with different configs."""
    first, *others = map(json.loads, group.everyone("configs", json.dumps(asdict(config))))
    for number, other in enumerate(others, 1):
        changes = [change for change in cli.changed(first, other) if not change[0].startswith(OF_A_PROCESS)]
        if changes:
            key, of_first, of_other = changes[0]
            raise UserError(
                f"{key}: must be the same in all processes, got {of_first!r} in {group.name(0)} and {of_other!r} in "
                f"{group.name(number)}; start all with the same flags and files"
            )


def check_same_data(job: Job) -> None:
    """Refuses processes that found different tokens."""
    group = job.group
    facts = [json.loads(text) for text in group.everyone("data", json.dumps(job.data_fingerprint))]
    for number, other in enumerate(facts):
        if changed := ", ".join(name for name in facts[0] if other.get(name) != facts[0][name]):
            raise UserError(
                f"data.source: must be the same text in all processes, got other data ({changed}) in "
                f"{group.name(number)} than in {group.name(0)}; prepare it once, on storage that they share"
            )
