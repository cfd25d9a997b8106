"""Attention compiled for a TPU that isn't there, by the TPU's own compiler."""

import os
import re
from collections import Counter
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from attention_cases import Attention, layout, lies, with_gradients
from jax.experimental import topologies

from angpt_jax.attention import attend, choose
from angpt_jax.layout import Layout

pytest.importorskip("libtpu", reason="the TPU's compiler, libtpu, is not installed (pip install -e '.[tpu]')")
os.environ["TPU_SKIP_MDS_QUERY"] = "1"  # no metadata server to ask
os.environ["ALLOW_MULTIPLE_LIBTPU_LOAD"] = "1"  # other tests may compile at the same time
PARTS = {"batch": (16, 1, 1), "context": (2, 2, 4)}
ROWS, L, H, G, K = 2, 2048, 8, 4, 64  # rows of a device
KERNELS = Counter(fwd=1, dq=1, dkv=1)


@cache
def split(name: str) -> Layout:
    return layout(*PARTS[name], devices=topologies.get_topology_desc(platform="tpu", topology_name="v5e:4x4").devices)


def compiled(compute: Attention, place: Layout) -> Any:
    """Values and gradients, in bfloat16, of windows of several documents."""

    def abstract(dtype: Any, sizes: tuple[int, ...], *names: str | None) -> jax.ShapeDtypeStruct:
        shape = (ROWS * place.parts("batch"), *sizes)
        return jax.ShapeDtypeStruct(shape, dtype, sharding=lies(place, *names))

    q = abstract(jnp.bfloat16, (L, H, K), "batch", "length", "heads", None)
    k = abstract(jnp.bfloat16, (L, G, K), "batch", "length", "kv_heads", None)
    segments = abstract(jnp.int32, (L,), "batch", "length")
    return jax.jit(with_gradients(compute)).lower(q, k, k, segments, q).compile()


def kernels(program: str) -> Counter[str]:
    return Counter(re.findall(r"%splash_mha_(fwd|dq|dkv)\w*?[.\d]* = .*tpu_custom_call", program))


def collectives(program: str) -> set[str]:
    return set(re.findall(r" (all-\w+|reduce-scatter|collective-permute)(?:-start)?\(", program))


@pytest.mark.parametrize("name", PARTS)
def test_auto_on_a_pod_is_splash(name):
    assert choose("auto", split(name), "bfloat16", False, K, L) == "splash"


def test_splash_compiles_with_the_batch_split():
    place = split("batch")
    program = compiled(lambda q, k, v, segments: attend("splash", q, k, v, segments, 8.0, place), place)
    assert kernels(program.as_text()) == KERNELS
    assert collectives(program.as_text()) == set()
    calls = [line for line in program.as_text().splitlines() if "tpu_custom_call" in line]
    operands = [re.findall(rf"(\w+)\[\d+,\d+,{L},{K}\]", call.partition("operand_layout")[2]) for call in calls]
    assert {dtype for each in operands for dtype in each} == {"bf16"} and min(map(len, operands)) >= 3  # q, k, v
    assert program.memory_analysis().temp_size_in_bytes < ROWS * H * L * L  # a byte for each score


def test_splash_compiles_with_windows_split():
    place = split("context")
    program = compiled(lambda q, k, v, segments: attend("splash", q, k, v, segments, 8.0, place), place)
    assert kernels(program.as_text()) == KERNELS
    assert collectives(program.as_text()) == {"all-gather", "reduce-scatter"}
    gathered = set(re.findall(r"= (\w+\[[\d,]+\])\S* all-gather\(", program.as_text()))
    assert gathered == {f"bf16[{ROWS},{L},{G // 2},{K}]", f"s32[{ROWS},{L}]"}


@pytest.mark.parametrize("names, forward", [(["attention"], 1), ([], 2)])
def test_the_name_attention_spares_the_backward_pass_the_forward_kernel(names, forward):
    place = split("batch")
    policy = jax.checkpoint_policies.save_only_these_names(*names)

    def compute(q: Any, k: Any, v: Any, segments: Any) -> Any:
        return jnp.square(attend("splash", q, k, v, segments, 8.0, place))  # the backward pass needs y

    program = compiled(jax.checkpoint(compute, policy=policy), place)
    assert kernels(program.as_text()) == KERNELS | Counter(fwd=forward)
