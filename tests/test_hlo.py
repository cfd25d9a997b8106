"""What the programs consist of: no norm anywhere in anGPT's forward pass, and one multiplication for each ν."""

import re
from dataclasses import fields, replace
from functools import cache
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import pytest
from conftest import BATCH, LENGTH, SIZES, tiny

from angpt_jax.arch import Arch
from angpt_jax.archs import RECIPES
from angpt_jax.archs.angpt import angpt
from angpt_jax.nu import Nu
from angpt_jax.places import override

pytestmark = pytest.mark.usefixtures("strict_dtypes")
REDUCE = re.compile(r"stablehlo\.reduce\(.*across dimensions = \[([\d, ]+)\] : \(tensor<([\dx]+)xf32>")
ROOT = re.compile(r"stablehlo\.r?sqrt .* : tensor<([\dx]*)x?f32>")
FEATURES = {SIZES.width, SIZES.head_width, SIZES.feed_forward, SIZES.vocab}  # D, K, F, V: what a norm runs over
NORMS = {  # square roots and reductions over features, in one layer (all layers are one body) and after the last
    "angpt": (0, 0),
    "gpt_plus": (2 + 2 + 1, 2 + 2 + 1),
    "gpt_plus_no_qk_norm": (2 + 1, 2 + 1),
    "gpt_plus_bound": (2 + 2 + 1, 2 + 2 + 1),
    "ngpt": (2 + 2 * 2, 2 + 2 * 2),
    "ngpt_bound": (2 + 2 * 2, 2 + 2 * 2),
    "pre_ln": (2 + 1, 2 * (2 + 1)),  # LayerNorm sums twice: mean and variance
    "post_ln": (2, 2 * 2),
    "deep_norm": (2, 2 * 2),
    "normformer": (2 + 1 + 1 + 1, 2 * (2 + 1 + 1 + 1)),
    "ln_scaling": (2 + 2 + 1, 2 + 2 + 1),
    "dyt": (2, 2),  # QK-norm alone
    "derf": (2, 2),
    "hybrid_norm": (3 + 1 + 1, 3 + 1 + 1),
    "scale_norm": (2 + 2 + 1, 2 + 2 + 1),
    "see_dnorm": (2 + 2 + 1, 2 + 2 + 1 + 3),  # and x · β
    "geo_norm": (2 + 2 * 2 + 1, 2 + 2 * 3 + 1),  # ‖h‖, ‖x⊥‖ and x · h
    "simple_norm": (3 + 1 + 2 + 1, 3 + 1 + 2 + 1),
}


@cache
def lowered(arch: Arch) -> Any:
    """The forward pass, before XLA optimizes it."""
    model = tiny(arch.name, arch=arch)
    tokens_BL = jax.ShapeDtypeStruct((BATCH, LENGTH), jnp.int32)
    apply = jax.jit(lambda params, tokens, segments: model.model.apply({"params": params}, tokens, segments))
    return apply.lower(nn.meta.unbox(model.boxed), tokens_BL, tokens_BL)


def shape(text: str) -> tuple[int, ...]:
    return tuple(int(length) for length in text.split("x"))


def reductions(arch: Arch) -> list[set[int]]:
    """The lengths that each reduction runs over."""
    found = REDUCE.findall(lowered(arch).as_text())
    assert len(found) == lowered(arch).as_text().count("stablehlo.reduce")
    return [{shape(operand)[int(axis)] for axis in axes.split(",")} for axes, operand in found]


def roots_of_activations(arch: Arch) -> int:
    """Square roots of arrays that have a batch axis; those of parameters and of a layer's number have none."""
    found = ROOT.findall(lowered(arch).as_text())
    assert len(found) == len(re.findall(r"stablehlo\.r?sqrt", lowered(arch).as_text()))
    return sum(operand.startswith(f"{BATCH}x") for operand in found)


def test_sizes_tell_the_axes_apart():
    lengths = [BATCH, LENGTH, SIZES.heads, SIZES.layers, *FEATURES]
    assert len(set(lengths)) == len(lengths) == 8


@pytest.mark.parametrize("recipe", RECIPES)
def test_norms_of_the_forward_pass(recipe):
    arch = RECIPES[recipe](SIZES)
    norms = [lengths for lengths in reductions(arch) if lengths & FEATURES]
    assert (roots_of_activations(arch), len(norms)) == NORMS[recipe]


def test_the_only_reductions_of_angpt_are_those_of_the_softmax():
    assert reductions(angpt(SIZES)) == [{LENGTH}, {LENGTH}]


def multiplications(arch: Arch) -> int:
    """Those of XLA's optimized program for one layer; without fusion, which would compute some of them twice."""
    options = {"xla_disable_hlo_passes": "fusion,cpu-instruction-fusion,fusion-wrapper"}
    return lowered(arch).compile(compiler_options=options).as_text().count(" multiply(")


@pytest.mark.parametrize("name", [field.name for field in fields(Nu)])
def test_a_nu_of_one_is_a_multiplication_less(name):
    """With c = 1 in SiLU(c · z): XLA makes one constant of ν_gate and c, so that ν_gate costs nothing in anGPT."""
    arch = override(angpt(SIZES), {"gate": {"gate_scale": 1.0}}, SIZES)
    assert multiplications(override(arch, {"nu": {name: 1.0}}, SIZES)) == multiplications(arch) - 1


def test_the_nu_of_the_gate_is_free():
    arch = angpt(SIZES)
    assert multiplications(replace(arch, nu=replace(arch.nu, gate=1.0))) == multiplications(arch)
