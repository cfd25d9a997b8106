"""Runs whose weights are used again: trained in this process, on the virtual devices of the tests."""

from pathlib import Path

import pytest
from commands import TINY, make_workspace

from angpt_jax import cli
from angpt_jax.config import Config
from angpt_jax.train import train

FLAGS = ("--config", "tiny.yaml", "--run.steps", "6", "--run.checkpoint_every_steps", "3")


def make_run(folder: Path, name: str, *flags: str) -> Path:
    """A run of six steps with checkpoints of steps 3 and 6, in a workspace at `folder`, which is made if need be."""
    if not folder.exists():
        make_workspace(folder)
        (folder / "tiny.yaml").write_text(TINY)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        config = cli.parse(Config, [*FLAGS, "--run.dir", f"runs/{name}", *flags], command="train")
        assert train(config, "tiny") == 0
    return folder / "runs" / name


def flip(run: Path, step: int) -> None:
    """Damages the largest file of a checkpoint, all over its middle."""
    largest = max((run / "checkpoints" / str(step)).rglob("d/*"), key=lambda path: path.stat().st_size)
    content = bytearray(largest.read_bytes())
    for place in range(len(content) // 4, 3 * len(content) // 4, 400):
        content[place] ^= 1
    largest.write_bytes(content)
