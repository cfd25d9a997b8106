"""`python -m angpt_jax.sample`: text from the newest checkpoint of a run."""

import math
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from angpt_jax import cli, host_memory, path_rules
from angpt_jax.config import FromRun, MeshConfig
from angpt_jax.schema import show


@dataclass(frozen=True)
class SampleConfig:
    """What to write.

    Args:
        run: where the model comes from
        prompt: text that every sample continues; empty starts a new document
        prompts: several such texts, in place of prompt, continued side by side
        samples: number of samples behind each prompt
        tokens: new tokens of each, at most; the end of a document or the model's context may end it sooner
        temperature: divides the logits; 0 always takes the likeliest token
        top_k: draws among the k likeliest tokens only; null among all
        top_p: draws among the likeliest tokens whose probabilities add up to this, in (0, 1]; null or 1 among all
        stop: texts that end a sample where one of them appears
        seed: seed of the draws
        fold: fold ν, α and s_Z into the matrices first, which leaves no norm and no factor; null is wherever the
            architecture allows it
        mesh: devices; by default each has the whole model and a part of the samples
    """

    run: FromRun = field(default_factory=FromRun)
    prompt: str = ""
    prompts: list[str] = field(default_factory=list)
    samples: int = 3
    tokens: int = 150
    temperature: float = 0.8
    top_k: int | None = 50
    top_p: float | None = None
    stop: list[str] = field(default_factory=list)
    seed: int = 0
    fold: bool | None = None
    mesh: MeshConfig = field(default_factory=lambda: MeshConfig(replica=-1, fsdp=1))


def sample(config: SampleConfig, name: str) -> int:
    """Prints the samples, the first one while it is made; returns the exit code."""
    cli.raise_problems(check(config))
    host_memory.keep_freed()
    from angpt_jax import run_dir, trained  # loads JAX
    from angpt_jax.decoding import Draw
    from angpt_jax.generate import Generator

    directory = Path(config.run.dir).absolute()
    context, tokenizer = run_dir.load_config(directory).model.context, trained.tokenizer_of(directory)
    prompts = [tokenizer.document(text) for text in config.prompts or [config.prompt]]
    cli.raise_problems(too_long(prompts, context))
    model = trained.load(directory, config.mesh, config.fold)
    texts = [text for text in config.prompts or [config.prompt] for _ in range(config.samples)]
    writer = Writer(texts, tokenizer, config.stop, f"of step {model.step}")
    generator = Generator(model.model, model.params, tokenizer, context)
    draw = Draw(config.temperature, config.top_k, None if config.top_p == 1 else config.top_p)
    prompts = [prompt for prompt in prompts for _ in range(config.samples)]
    for new in generator.stream(prompts, config.tokens, draw, config.seed, writer.is_stopped):
        writer.add(new)
    writer.close()
    return 0


class Writer:
    """Prints samples: the first as it comes, the others behind it."""

    def __init__(self, prompts: list[str], tokenizer: Any, stop: list[str], which: str) -> None:
        self._prompts, self._tokenizer, self._stop, self._which = prompts, tokenizer, stop, which
        self._rows: list[list[int]] = [[] for _ in prompts]
        self._printed = ""
        self._begin(0)

    def is_stopped(self, ids: list[int]) -> bool:
        """Whether one of the texts that end a sample is there; only its last tokens can have brought it."""
        return bool(self._stop) and any(text in self._tokenizer.decode(ids) for text in self._stop)

    def add(self, new: list[list[int]]) -> None:
        """Takes the new ids of each sample."""
        for row, ids in zip(self._rows, new, strict=True):
            row += ids
        text = self._text(0).removesuffix("\ufffd")  # bytes of a character may be missing
        if self._stop:  # the beginning of one may be there
            text = text[: max(0, len(text) - max(map(len, self._stop)))]
        self._print(text)

    def close(self) -> None:
        self._print(self._text(0))
        print()
        for number in range(1, len(self._prompts)):
            self._begin(number)
            print(self._text(number))

    def _begin(self, number: int) -> None:
        print(f"--- sample {number + 1} {self._which} ---")
        print(self._prompts[number], end="", flush=True)

    def _text(self, number: int) -> str:
        text = self._tokenizer.decode(self._rows[number])
        return text[: min((text.index(stop) for stop in self._stop if stop in text), default=None)]

    def _print(self, text: str) -> None:
        """What of the first sample was not printed yet."""
        if text.startswith(self._printed):
            sys.stdout.write(text[len(self._printed) :])
            sys.stdout.flush()
            self._printed = text


def too_long(prompts: list[list[int]], context: int) -> Iterator[str]:
    """Problems of prompts that leave no room for a token."""
    for prompt in prompts:
        if len(prompt) >= context:
            yield (
                f"prompt: leaves no room in the context of {context} tokens, got {len(prompt) - 1} tokens; at most "
                f"{context - 2}"
            )


def check(config: SampleConfig) -> list[str]:
    """Problems of the values themselves."""
    problems = [*path_rules.of_path("run.dir", config.run.dir)]
    problems += [
        f"{name}: must be at least 1, got {value}; 1 or more"
        for name, value in (("samples", config.samples), ("tokens", config.tokens), ("top_k", config.top_k))
        if value is not None and value < 1
    ]
    if not (math.isfinite(config.temperature) and config.temperature >= 0):
        problems.append(f"temperature: must be a finite number >= 0, got {config.temperature}; 0 is greedy")
    if config.top_p is not None and not 0 < config.top_p <= 1:
        problems.append(f"top_p: must be in (0, 1], got {config.top_p}; 1 or null draws among all tokens")
    if config.prompt and config.prompts:
        problems.append(f"prompts: stand in place of prompt, got both (prompt {show(config.prompt)}); one of them")
    if "" in config.stop:
        problems.append("stop: must not hold an empty text, got ''; texts of one character or more")
    for key, texts in (("prompt", [config.prompt]), ("prompts", config.prompts), ("stop", config.stop)):
        problems += [f"{key}: must be UTF-8 text, got {show(text)}" for text in texts if not is_text(text)]
    if config.mesh.context != 1:
        problems.append(f"mesh.context: a token at a time can't be split, got {config.mesh.context}; 1")
    return problems


def is_text(text: str) -> bool:
    """Whether a text can be written in UTF-8: what comes from a command line can hold bytes that are none."""
    return not any("\ud800" <= character <= "\udfff" for character in text)


if __name__ == "__main__":
    cli.main(sample, SampleConfig, command="sample", default_config=None)
