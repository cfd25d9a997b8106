"""Every config in configs/ can be read, keeps the rules, builds, and tells the truth in its header."""

import re
from dataclasses import replace
from pathlib import Path

import flax.linen as nn
import jax
import jax.numpy as jnp
import pytest

from angpt_jax import cli, compare, contenders, evaluate, experiment, flops, rules
from angpt_jax.compare import CompareConfig
from angpt_jax.config import Config
from angpt_jax.evaluate import EvaluateConfig
from angpt_jax.model import Decoder

CONFIGS = sorted((Path(__file__).parent.parent / "configs").glob("*.yaml"))
EVALUATIONS = sorted((Path(__file__).parent.parent / "configs" / "evaluate").glob("*.yaml"))
COMPARISONS = sorted((Path(__file__).parent.parent / "configs" / "compare").glob("*.yaml"))
PODS = {"angpt_1b_v5e_256": 256, "angpt_1b_v5p_1024": 1024, "angpt_1b_8xh100": 8}  # devices
SIZED = [path for path in CONFIGS if not path.stem.startswith("default") and path.stem not in PODS]


def parse(path: Path) -> Config:
    return cli.parse(Config, ["--config", str(path)], command="train")


def parameter_count(config: Config) -> int:
    config, arch, sizes = experiment.resolved(config)
    tokens = jnp.zeros((1, 8), jnp.int32)
    shapes = jax.eval_shape(Decoder(arch, sizes).init, jax.random.key(0), tokens, tokens)
    return flops.parameter_count(nn.meta.unbox(shapes))


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_it_keeps_the_rules_and_its_header_is_true(path: Path) -> None:
    config = parse(path)
    assert rules.check(config) == []
    header = path.read_text()
    tokens = config.run.steps * config.data.batch_size * config.model.context
    assert f"Parameters: {parameter_count(config):,}." in header
    assert f"Tokens: {tokens:,} ({config.run.steps:,} steps of {config.data.batch_size} sequences" in header
    command = re.search(r"Command: +(.*)", header)
    flags = "" if path.stem == "default" else f" --config {path.stem}"
    assert command and command[1] == "bash launch/local.sh" + flags


@pytest.mark.parametrize("path", EVALUATIONS, ids=lambda path: path.stem)
def test_what_lies_in_the_folder_of_a_command_is_a_config_of_it(path: Path) -> None:
    """And its name is enough for that command, as the header says."""
    config = cli.parse(EvaluateConfig, ["--config", path.stem], command="evaluate")
    assert evaluate.check(config) == [] and config != EvaluateConfig()
    assert f"python -m angpt_jax.evaluate --config {path.stem} --run.dir runs/NAME" in path.read_text()


@pytest.mark.parametrize("path", COMPARISONS, ids=lambda path: path.stem)
def test_contenders_see_the_same_batches(path: Path) -> None:
    config = cli.parse(CompareConfig, ["--config", path.stem], command="compare")
    table, problems = compare.contenders_of(config)
    assert [*problems, *compare.check(config, table)] == []
    assert len(contenders.checked(table, config.baseline or table[0].name)) == len(table)
    assert f"python -m angpt_jax.compare --config {path.stem} " in path.read_text()


def test_there_are_twins_of_every_size() -> None:
    sizes = ("32m", "62m", "125m", "250m", "0p5b", "1b")
    assert {path.stem for path in SIZED} == {f"{a}_{s}" for a in ("angpt", "gpt_plus", "ngpt") for s in sizes}


@pytest.mark.parametrize(
    "path", [path for path in CONFIGS if path.stem == "default" or path in SIZED and "angpt_" in path.stem], ids=str
)
def test_twins_differ_in_architecture_inits_and_learning_rate_only(path: Path) -> None:
    angpt = parse(path)
    for arch in ("gpt_plus", "ngpt"):
        name = path.stem.replace("angpt", arch) if path in SIZED else f"default_{arch}"
        twin = parse(path.with_stem(name))
        assert twin.model.arch == arch
        same = replace(
            twin,
            model=replace(twin.model, arch="angpt", places=angpt.model.places),
            optim=replace(twin.optim, peak_lr=angpt.optim.peak_lr),
        )
        assert same == angpt


@pytest.mark.parametrize("name", PODS)
def test_a_config_for_a_pod_is_the_model_of_its_size_on_that_many_devices(name: str) -> None:
    pod, plain = (parse(CONFIGS[0].with_stem(stem)) for stem in (name, "angpt_1b"))
    assert rules.check(pod, PODS[name]) == []
    tokens = pod.run.steps * pod.data.batch_size
    assert tokens == pytest.approx(plain.run.steps * plain.data.batch_size, rel=1e-3)
    model = replace(pod.model, remat=plain.model.remat, loss_vocab_chunk=None)
    optim = replace(pod.optim, micro_batches=1)
    data = replace(pod.data, batch_size=plain.data.batch_size)
    run = replace(pod.run, steps=plain.run.steps)
    assert replace(pod, model=model, optim=optim, data=data, run=run, mesh=plain.mesh) == plain
