"""`python -m angpt_jax.sample`: text from the newest checkpoint of a run."""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from angpt_jax import cli, experiment, run_dir
from angpt_jax.data.tokenizer import Tokenizer
from angpt_jax.data.tokens import load_tokens
from angpt_jax.errors import UserError
from angpt_jax.restore import newest_valid


@dataclass(frozen=True)
class SampleRun:
    """Where the model comes from.

    Args:
        dir: run directory that holds the checkpoint
    """

    dir: str = "runs/default"


@dataclass(frozen=True)
class SampleConfig:
    """What to write.

    Args:
        run: where the model comes from
        prompt: text that every sample continues; empty starts a new document
        samples: number of samples
        tokens: new tokens of each, at most; the model's context may end it sooner
        temperature: divides the logits; 0 always takes the likeliest token
        top_k: draws among the k likeliest tokens only; null among all
        seed: seed of the draws
    """

    run: SampleRun = field(default_factory=SampleRun)
    prompt: str = ""
    samples: int = 3
    tokens: int = 150
    temperature: float = 0.8
    top_k: int | None = 50
    seed: int = 0


def sample(config: SampleConfig, name: str) -> int:
    """Prints the samples; returns the exit code."""
    cli.raise_problems(check(config))
    directory = Path(config.run.dir).absolute()
    trained = run_dir.load_config(directory)
    tokenizer = load_tokens(trained.data, trained.model.vocab).tokenizer
    prompt = [tokenizer.end_of_document, *tokenizer.encode([config.prompt])[0].tolist()]
    if len(prompt) >= trained.model.context:
        raise UserError(
            f"prompt: leaves no room in the context of {trained.model.context} tokens, got {len(prompt) - 1} tokens; "
            f"at most {trained.model.context - 2}"
        )
    trained, arch, sizes = experiment.resolved(trained)
    built = experiment.build(trained, arch, sizes)
    found = newest_valid(run_dir.checkpoints_of(directory), built.abstract, rename=False)
    if found is None:
        raise UserError(f"run.dir: holds no checkpoint, got {str(directory)!r}; train it first")
    generate = make_generate(experiment.on_one_device(built.model), tokenizer, config)
    length = min(len(prompt) + config.tokens, trained.model.context)
    buffer = np.full((config.samples, length), tokenizer.end_of_document, np.int32)
    buffer[:, : len(prompt)] = prompt
    ids = np.asarray(generate(found.state.params, buffer, len(prompt), jax.random.key(config.seed)))
    for number, row in enumerate(ids, start=1):
        print(f"--- sample {number} of step {found.step} ---")
        print(tokenizer.decode(row.tolist()))
    return 0


def make_generate(
    model: nn.Module, tokenizer: Tokenizer, config: SampleConfig
) -> Callable[[Any, np.ndarray, int, Array], Array]:
    """params, ids_BL, length of the prompt, key → ids_BL filled up, one forward pass over the window a token."""

    def generate(params: Any, ids_BL: Array, prompt_length: Array, key: Array) -> Array:
        def fill(position: Array, ids_BL: Array) -> Array:
            segments_BL = jnp.cumsum(ids_BL == tokenizer.end_of_document, axis=1)
            logits_BLV = cast(Array, model.apply({"params": params}, ids_BL, segments_BL))
            logits_BV = logits_BLV[:, position - 1]
            allowed_V = jnp.arange(logits_BV.shape[-1]) < tokenizer.size  # padded entries stand for nothing
            drawn_B = draw(
                jax.random.fold_in(key, position),
                jnp.where(allowed_V, logits_BV, -jnp.inf),
                config.temperature,
                config.top_k,
            )
            return ids_BL.at[:, position].set(drawn_B)

        return jax.lax.fori_loop(prompt_length, ids_BL.shape[1], fill, ids_BL)

    return jax.jit(generate)


def draw(key: Array, logits_BV: Array, temperature: float, top_k: int | None) -> Array:
    """One id for each row of logits."""
    if temperature == 0:
        return jnp.argmax(logits_BV, axis=-1)
    if top_k is not None and top_k < logits_BV.shape[-1]:
        smallest_B1 = jax.lax.top_k(logits_BV, top_k)[0][:, -1:]
        logits_BV = jnp.where(logits_BV < smallest_B1, -jnp.inf, logits_BV)
    return jax.random.categorical(key, logits_BV / temperature)


def check(config: SampleConfig) -> list[str]:
    """Problems of the values themselves."""
    problems = [
        f"{name}: must be at least 1, got {value}; 1 or more"
        for name, value in (("samples", config.samples), ("tokens", config.tokens), ("top_k", config.top_k))
        if value is not None and value < 1
    ]
    if not (math.isfinite(config.temperature) and config.temperature >= 0):
        problems.append(f"temperature: must be a finite number >= 0, got {config.temperature}; 0 is greedy")
    return problems


if __name__ == "__main__":
    cli.main(sample, SampleConfig, command="sample", default_config=None)
