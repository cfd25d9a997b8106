"""What the tests of the command line share: a tiny config, schemas of every shape, and ways to parse."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import pytest

from angpt_jax import cli
from angpt_jax.config import Config
from angpt_jax.errors import UserError

TINY = """\
model: {arch: angpt, width: 64, layers: 2, heads: 4, vocab: 257, context: 32}
optim: {peak_lr: 3e-4}
data:
  batch_size: 8
mesh:
run: {steps: 100}
"""
RUN_KEYS = (
    "steps, dir, stop_at_step, log_every_steps, instrument_every_steps, eval_every_steps, checkpoint_every_steps, "
    "keep_latest, keep_every_steps, seed, resume, init_from"
)
TOP_KEYS = "model, optim, data, run, mesh, distributed, dry_run"
MODEL_KEYS = (
    "arch, width, layers, heads, vocab, context, feed_forward, kv_heads, tied_embeddings, rope_theta, compute_dtype, "
    "scan_layers, remat, attention, loss_vocab_chunk, places"
)


@dataclass(frozen=True)
class Draw:
    """How to draw.

    Args:
        top_k: the k likeliest,
            none of the others
        temperature: divides logits by 100 % of it
    """

    top_k: int | None = 40
    temperature: float = 0.8


@dataclass(frozen=True)
class Text:
    """What to write.

    Args:
        runs: folders
        prompt: begin with this
        draw: how to draw
        sizes: sizes to try
        pair: two of them
        mode: a number or a word
        grid: values by key
    """

    runs: list[str]
    prompt: str = ""
    draw: Draw = field(default_factory=lambda: Draw(top_k=3))
    sizes: list[int] | None = None
    pair: tuple[float, ...] = (1.0, 2.0)
    mode: Literal[1, "two"] = 1
    grid: dict[str, list[float]] = field(default_factory=dict)


def make_folder(path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Makes `path` the working directory, with configs/tiny.yaml in it."""
    monkeypatch.chdir(path)
    Path("configs").mkdir()
    Path("configs/tiny.yaml").write_text(TINY)
    return path


def train(*argv: str) -> Config:
    return cli.parse(Config, ["--config", "tiny", *argv], command="train")


def bare_train(*argv: str) -> Config:
    return cli.parse(Config, list(argv), command="train")


def write(*argv: str) -> Text:
    return cli.parse(Text, list(argv), command="text")


def problems(call: Any, *argv: str) -> list[str]:
    with pytest.raises(UserError) as caught:
        call(*argv)
    assert all(line.isprintable() for line in caught.value.problems)
    return list(caught.value.problems)
