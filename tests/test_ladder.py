"""The ladders of configs/ladder: every size of every architecture is a config that builds and is what it says."""

import re
from pathlib import Path

import pytest
from test_configs import SIZED, parameter_count

from angpt_jax import cli, experiment, rules
from angpt_jax.config import Config

FOLDER = Path(__file__).parent.parent / "configs" / "ladder"
ARCHS = {"angpt": "anGPT", "gpt_plus": "GPT+", "ngpt": "nGPT"}
SIZES = {"0p2m": 0.2, "0p5m": 0.5, "1m": 1.0, "1p6m": 1.6, "5m": 5.0, "10m": 10.0}
README = (FOLDER / "README.md").read_text()


def parse(arch: str, size: str) -> Config:
    files = [word for name in (arch, size) for word in ("--config", str(FOLDER / f"{name}.yaml"))]
    return cli.parse(Config, files, command="train")


def test_the_files_are_the_architectures_and_the_sizes() -> None:
    assert {path.stem for path in FOLDER.glob("*.yaml")} == {*ARCHS, *SIZES}


@pytest.mark.parametrize("size", SIZES)
def test_every_architecture_of_a_size_builds_and_the_header_is_true(size: str) -> None:
    header = (FOLDER / f"{size}.yaml").read_text()
    counts = {}
    for arch, name in ARCHS.items():
        config = parse(arch, size)
        assert rules.check(config) == []
        assert experiment.resolved(config)[0].model.arch == arch
        counts[name] = parameter_count(config)
        tokens = config.run.steps * config.data.batch_size * config.model.context
        assert f"Tokens: {tokens:,} ({config.run.steps:,} steps of {config.data.batch_size} sequences" in header
        assert abs(counts[name] / (SIZES[size] * 1e6) - 1) < 0.06
        assert 1 <= tokens / counts[name] <= 20
    assert f"Parameters: {', '.join(f'{name} {count:,}' for name, count in counts.items())}." in header
    assert f"| {size} | {counts['anGPT']:,} | {tokens:,} |" in README


@pytest.mark.parametrize("arch", ARCHS)
def test_sizes_share_what_makes_their_losses_comparable(arch: str) -> None:
    """So that `scaling` takes the runs of an architecture together."""
    first, *others = (parse(arch, size) for size in SIZES)
    for config in others:
        assert (config.data, config.optim, config.model.places) == (first.data, first.optim, first.model.places)
        assert (config.model.vocab, config.model.context) == (first.model.vocab, first.model.context)


@pytest.mark.parametrize("arch", ARCHS)
def test_the_architecture_is_that_of_the_default(arch: str) -> None:
    name = "default" if arch == "angpt" else f"default_{arch}"
    default = cli.parse(Config, ["--config", name], command="train")
    ours = parse(arch, "1p6m")
    assert (ours.model, ours.optim, ours.data) == (default.model, default.optim, default.data)


def test_the_readme_names_the_papers_ladder() -> None:
    names = set(re.findall(r"\d+p?\d*[mb]\b", README.partition("## The paper's ladder")[2].partition("## ")[0]))
    assert names >= {path.stem.rpartition("_")[2] for path in SIZED}
