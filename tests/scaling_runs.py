"""Run directories of finished runs whose losses follow laws that are known."""

import json
from pathlib import Path
from typing import Any

import numpy as np

from angpt_jax import cli
from angpt_jax.config import Config
from angpt_jax.laws.loss import LossLaw

LAW = LossLaw(E=1.7, A=400.0, B=410.0, alpha=0.34, beta=0.28)
BEST_BATCH, BEST_LR = 0.25, -0.4  # exponents of N
WIDTHS = (64, 96, 128, 192, 256, 384)
BATCH = "--data.batch_size"


def parameters(width: int, vocab: int = 512, layers: int = 2) -> int:
    """12 · layers · width² and the two matrices of embedding and head, as a plain Transformer has."""
    return 12 * layers * width**2 + 2 * vocab * width


def penalty(n: float, batch_tokens: float, lr: float) -> float:
    """What a batch size and a learning rate cost that are not the best: 0 at 8192 · (N/10⁶)^b and 1e-3 · (N/10⁶)^c."""
    batch, best_lr = 8192 * (n / 1e6) ** BEST_BATCH, 1e-3 * (n / 1e6) ** BEST_LR
    return 0.02 * np.log(batch_tokens / batch) ** 2 + 0.05 * np.log(lr / best_lr) ** 2


def make_run(folder: Path, arch: str, width: int, tokens: float, loss: float, *flags: str, **summary: Any) -> Path:
    """A run that has ended."""
    sizes = {"arch": arch, "width": width, "layers": 2, "heads": 2, "vocab": 512, "context": 64}
    words = [word for key, value in sizes.items() for word in (f"--model.{key}", str(value))]
    given = {"--optim.peak_lr": "1e-3", "--data.batch_size": "64"} | dict(zip(flags[::2], flags[1::2], strict=True))
    steps = max(1, round(tokens / (64 * int(given["--data.batch_size"]))))
    given |= {"--run.steps": str(steps)}
    config = cli.parse(Config, [*words, *(word for pair in given.items() for word in pair)], command="train")
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text(cli.to_yaml(config))
    facts = {"arch": arch, "parameters": parameters(width), "steps": steps, "val_loss": loss, "stopped_by": "steps"}
    facts |= {"tokens": steps * 64 * config.data.batch_size} | summary
    (folder / "summary.json").write_text(json.dumps(facts))
    (folder / "metrics.jsonl").write_text(
        json.dumps({"step": steps, "tokens": facts["tokens"], "val_loss": loss}) + "\n"
    )
    return folder


def make_grid(folder: Path, arch: str = "angpt", noise: float = 0.002, widths: tuple[int, ...] = WIDTHS) -> None:
    """Three lengths of each size."""
    random = np.random.default_rng(0)
    for width in widths:
        for ratio in (10, 40, 160):
            n = parameters(width)
            loss = float(LAW(n, ratio * n) * np.exp(noise * random.standard_normal()))
            make_run(folder / f"{arch}_{width}_{ratio}", arch, width, ratio * n, loss)
