"""The table of what lies where says what the arrays themselves say."""

import re

import jax
import pytest
from conftest import by_path

from angpt_jax import cli, experiment, placement
from angpt_jax.config import Config
from angpt_jax.experiment import Experiment

SIZES = "--model.width 64 --model.layers 2 --model.heads 4 --model.vocab 256 --model.context 16 --data.batch_size 8"


def built(*flags: str, arch: str = "angpt") -> Experiment:
    given = ["--model.arch", arch, *SIZES.split(), "--optim.peak_lr", "1e-3", "--run.steps", "9", *flags]
    return experiment.build(*experiment.resolved(cli.parse(Config, given, command="train")))


def table(*flags: str, arch: str = "angpt") -> dict[str, list[str]]:
    """Lines by their first cell, the cells being two blanks apart."""
    lines = placement.table(built(*flags, arch=arch))
    return {cells[0]: cells[1:] for cells in (re.split(r"\s{2,}", line) for line in lines)}


def test_each_parameter_has_a_line_with_shape_split_bytes_and_norm():
    lines = table("--mesh.tensor", "2")
    assert set(by_path(built().abstract.params)) <= set(lines)
    assert lines["parameter"] == ["shape", "split over", "bytes/device", "norm over"]
    assert lines["layers/attention/query"] == ["2 × 64 × 64", "embed: fsdp, heads: tensor", "4,096", "embed: fsdp"]
    assert lines["layers/mlp/down"] == [
        "2 × 256 × 64",
        "feed_forward: tensor, embed: fsdp",
        "16,384",
        "feed_forward: tensor",
    ]
    assert lines["layers/mlp_residual/alpha"] == ["2 × 64", "nothing", "512"]
    assert lines["logits/logit_scale"] == ["256", "vocab: tensor", "512"]


@pytest.mark.parametrize(
    "arch, local",
    [("angpt", {"attention_out", "down"}), ("ngpt", set()), ("gpt_plus", set())],
)
def test_norms_that_cross_devices_are_marked(arch, local):
    """fsdp splits `embed`. Rows of W run along it but for the maps to the stream; nGPT's vectors all do."""
    lines = table(arch=arch)
    matrices = [path for path, axis in by_path(built(arch=arch).axes).items() if axis.is_matrix]
    crossing = {path for path in matrices if len(lines[path]) == 4}
    assert all(lines[path][3] == "embed: fsdp" for path in crossing)
    expected = set() if arch == "gpt_plus" else {path for path in matrices if path.rpartition("/")[2] not in local}
    assert crossing == expected


@pytest.mark.parametrize("flags", [(), ("--mesh.tensor", "2"), ("--mesh.preset", "data_parallel")])
def test_the_bytes_are_those_that_a_device_holds(flags):
    experiment_ = built(*flags)
    params = jax.tree.map(lambda x: jax.device_put(jax.numpy.zeros(x.shape), x.sharding), experiment_.abstract.params)
    here = sum(leaf.addressable_shards[0].data.nbytes for leaf in jax.tree.leaves(params))
    whole = sum(leaf.nbytes for leaf in jax.tree.leaves(params))
    assert f"parameters: {whole:,} bytes, {here:,} on each device" in placement.table(experiment_)


def test_a_start_says_the_code_of_attention_and_on_several_devices_the_table():
    given = cli.parse(
        Config, ["--model.arch", "angpt", *SIZES.split(), *"--optim.peak_lr 1 --run.steps 9".split()], command="x"
    )
    alone = experiment.build(*experiment.resolved(given), jax.devices()[:1])
    assert placement.at_start(alone, "auto") == ["attention: blocks (auto)"]
    assert placement.at_start(alone, "blocks") == ["attention: blocks"]
    several = built("--mesh.tensor", "2")
    assert placement.at_start(several, "auto") == [
        "attention: blocks (auto)",
        "mesh: replica 1, fsdp 4, tensor 2, context 1",
        *placement.table(several),
    ]
