"""Which implementation `auto` is on which device, and what a named one can't do, in one line each."""

from types import SimpleNamespace
from typing import Any, cast

import jax
import numpy as np
import pytest

from angpt_jax.attention import choose
from angpt_jax.errors import UserError
from angpt_jax.layout import Layout

CPU = SimpleNamespace(platform="cpu", device_kind="cpu")
TPU = SimpleNamespace(platform="tpu", device_kind="TPU v5 lite")
H100 = SimpleNamespace(platform="gpu", device_kind="NVIDIA H100 80GB HBM3", compute_capability="9.0")
A100 = SimpleNamespace(platform="gpu", device_kind="NVIDIA A100-SXM4-40GB", compute_capability="8.0")
V100 = SimpleNamespace(platform="gpu", device_kind="Tesla V100-SXM2-16GB", compute_capability="7.0")
AMD = SimpleNamespace(platform="gpu", device_kind="AMD Instinct MI300X", compute_capability="gfx942")
METAL = SimpleNamespace(platform="metal", device_kind="Metal")
CAN: dict[str, Any] = dict(dtype="bfloat16", attend_across_documents=True, head_width=64, context=2048)


def layout(device: Any, parts: int = 1) -> Layout:
    """A mesh of such devices, a window split over `parts` of them."""
    mesh = SimpleNamespace(devices=np.array([[device] * parts]), shape={"fsdp": 1, "context": parts})
    return Layout(cast(Any, mesh), (("batch", ("fsdp",)), ("length", ("context",))))


@pytest.mark.parametrize(
    "device, parts, other, chosen",
    [
        (CPU, 1, {}, "blocks"),
        (CPU, 4, {}, "blocks"),
        (TPU, 1, {}, "splash"),
        (TPU, 16, {}, "splash"),
        (TPU, 1, {"dtype": "float32", "attend_across_documents": False, "head_width": 20}, "splash"),
        (TPU, 1, {"context": 2000}, "xla"),
        (TPU, 32, {}, "xla"),
        (H100, 1, {}, "cudnn"),
        (H100, 1, {"head_width": 256}, "cudnn"),
        (A100, 1, {"head_width": 128}, "cudnn"),
        (A100, 1, {"head_width": 256}, "xla"),
        (H100, 2, {}, "xla"),
        (H100, 1, {"attend_across_documents": False}, "xla"),
        (H100, 1, {"dtype": "float32"}, "xla"),
        (V100, 1, {}, "xla"),
        (AMD, 1, {}, "xla"),
        (METAL, 1, {}, "xla"),
    ],
)
def test_auto_is_the_best_that_can_do_it(device, parts, other, chosen):
    assert choose("auto", layout(device, parts), **CAN | other) == chosen


def test_without_a_mesh_the_devices_are_those_here():
    assert jax.default_backend() != "cpu" or choose("auto", Layout(), **CAN) == "blocks"


@pytest.mark.parametrize("device", [CPU, TPU, H100, AMD, METAL])
@pytest.mark.parametrize("name", ["reference", "blocks", "xla"])
def test_three_can_do_everything_everywhere(name, device):
    for parts in (1, 2):
        assert choose(name, layout(device, parts), "float32", False, 20, 2000) == name


REFUSED = [
    ("splash", CPU, 1, {}, ["splash needs a TPU, got cpu devices; reference, blocks, xla or auto would do"]),
    (
        "splash",
        H100,
        1,
        {},
        ["splash needs a TPU, got NVIDIA H100 80GB HBM3 devices; reference, blocks, xla, cudnn or auto would do"],
    ),
    (
        "splash",
        TPU,
        1,
        {"context": 2000},
        [
            "splash needs a multiple of 128 tokens, got model.context 2000; "
            "1920 or 2048 there, or reference, blocks, xla or auto here, would do"
        ],
    ),
    (
        "splash",
        TPU,
        4,
        {"context": 384},
        [
            "splash needs a multiple of 128 * mesh.context = 512 tokens, got model.context 384; "
            "512 there, or reference, blocks, xla or auto here, would do"
        ],
    ),
    ("cudnn", CPU, 1, {}, ["cudnn needs an NVIDIA GPU, got cpu devices; reference, blocks, xla or auto would do"]),
    (
        "cudnn",
        TPU,
        1,
        {},
        ["cudnn needs an NVIDIA GPU, got TPU v5 lite devices; reference, blocks, xla, splash or auto would do"],
    ),
    (
        "cudnn",
        AMD,
        1,
        {},
        ["cudnn needs an NVIDIA GPU, got AMD Instinct MI300X devices; reference, blocks, xla or auto would do"],
    ),
    (
        "cudnn",
        V100,
        1,
        {},
        ["cudnn needs compute capability 8.0 or more, got 7.0; reference, blocks, xla or auto would do"],
    ),
    (
        "cudnn",
        H100,
        1,
        {"attend_across_documents": False},
        [
            "cudnn can't part documents, got data.attend_across_documents false; "
            "true there, or reference, blocks, xla or auto here, would do"
        ],
    ),
    (
        "cudnn",
        H100,
        1,
        {"dtype": "float32"},
        [
            "cudnn needs bfloat16, got model.compute_dtype float32; "
            "bfloat16 there, or reference, blocks, xla or auto here, would do"
        ],
    ),
    (
        "cudnn",
        A100,
        4,
        {"head_width": 132},
        [
            "cudnn needs a head width that is a multiple of 8 and at most 128, got model.width / model.heads = 132; "
            "reference, blocks, xla or auto would do",
            "cudnn needs whole windows, got mesh.context 4; 1 there, or reference, blocks, xla or auto here, would do",
        ],
    ),
]


@pytest.mark.parametrize("name, device, parts, other, lines", REFUSED)
def test_a_name_never_falls_back(name, device, parts, other, lines):
    with pytest.raises(UserError) as error:
        choose(name, layout(device, parts), **CAN | other)
    assert error.value.problems == tuple(f"model.attention: {line}" for line in lines)
