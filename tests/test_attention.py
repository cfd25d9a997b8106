"""Every implementation of attention against the reference: values, gradients, meshes, what is seen and what is kept."""

import re
from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention_cases import HEADS, SCALE, arrays, attention, documents, layout, lies, text_of, with_gradients

from angpt_jax import ops
from angpt_jax.attention import attend, blocks
from angpt_jax.attention.splash import block
from angpt_jax.layout import Layout

B, L, H, G, K = 2, 1024, 4, 2, 8  # two blocks of the kernel in a window
SEGMENTS = {"one document": None, "documents": documents(B, L)}
LARGE = 4.0  # scores beyond 16, which bfloat16 would round by 2⁻⁴; a power of two rounds no query
EXACT = 1e-5  # of the largest value: float32 sums of L products in another order; 1e-6 was seen
ROUNDED = 2**-6  # of the largest value: weights, results and gradients are rounded by 2⁻⁹ each; 2⁻⁷ was seen
LAYOUTS: dict[str, tuple[Any, ...]] = {  # fsdp, tensor, context
    "batch": (2, 1, 1),
    "heads": (1, 2, 1),
    "length": (1, 1, 2),
    "length in four": (1, 1, 4),
    "all": (2, 2, 2),
}


def layout_of(name: str) -> Layout:
    return layout(*LAYOUTS[name]) if name in LAYOUTS else Layout()


@cache
def computed(implementation: Any, segments: str, split: str = "nothing") -> list[np.ndarray]:
    """y, dq, dk, dv, in float32."""
    *inputs, dy = arrays(B, L, H, G, K)
    compute = with_gradients(attention(implementation, SCALE, layout_of(split)))
    return [np.asarray(x) for x in jax.jit(compute)(*inputs, SEGMENTS[segments], dy)]


def assert_close(found: Any, expected: Any, tolerance: float) -> None:
    for x, y, name in zip(found, expected, ("y", "dq", "dk", "dv"), strict=True):
        np.testing.assert_allclose(x, y, rtol=0, atol=tolerance * np.abs(y).max(), err_msg=name)


@pytest.mark.parametrize("segments", SEGMENTS)
@pytest.mark.parametrize("implementation", ["blocks", "xla", "splash"])
def test_an_implementation_is_the_reference(implementation, segments):
    expected = computed("reference", segments)
    assert_close(computed(implementation, segments), expected, EXACT)


@pytest.mark.parametrize("implementation", ["reference", "blocks", "xla", "splash"])
def test_in_bfloat16_scores_and_softmax_are_float32(implementation):
    q, k, v, dy = arrays(B, 256, H, G, K, jnp.bfloat16)
    exact = with_gradients(attention("reference", LARGE, Layout()))
    expected = jax.jit(exact)(*(x.astype(jnp.float32) for x in (q, k, v)), None, dy.astype(jnp.float32))
    found = jax.jit(with_gradients(attention(implementation, LARGE, Layout())))(q, k, v, None, dy)
    assert {x.dtype for x in found} == {jnp.dtype(jnp.bfloat16)}
    assert_close([np.asarray(x, np.float32) for x in found], [np.asarray(x) for x in expected], ROUNDED)


@pytest.mark.parametrize("split", LAYOUTS)
@pytest.mark.parametrize("implementation", ["reference", "blocks", "xla", "splash"])
def test_on_a_mesh_it_is_what_it_is_on_one_device(implementation, split):
    segments = "one document" if split == "length" else "documents"
    expected = computed("reference", segments)
    assert_close(computed(implementation, segments, split), expected, EXACT)


def test_the_cases_tell_wrong_attention_from_right():
    """So that none of the comparisons above is one of two states that agree whatever is computed."""
    first, second = (computed("reference", segments) for segments in SEGMENTS)
    for x, y in zip(first, second, strict=True):
        assert np.abs(x - y).max() > 0.1 * np.abs(x).max()


@pytest.mark.parametrize("key_heads", [1, 2])
@pytest.mark.parametrize("implementation", ["reference", "blocks", "xla", "splash"])
def test_queries_keep_their_keys_where_there_are_fewer_than_devices(implementation, key_heads):
    own = layout(1, 4, 2, rules=(HEADS, ("length", ("context",))))
    compare(implementation, own, arrays(1, 256, 8, key_heads, K))


@pytest.mark.parametrize("place", [Layout(), layout(1, 1, 2)], ids=["one device", "length"])
def test_a_part_of_a_window_may_be_several_blocks(place):
    assert block(640) == 128
    compare("splash", place, arrays(1, 640 * place.parts("length"), 1, 1, K))


def compare(implementation: Any, place: Layout, given: list[Any]) -> None:
    """With the reference on one device."""
    *inputs, dy = given
    expected = jax.jit(with_gradients(attention("reference", SCALE, Layout())))(*inputs, None, dy)
    found = jax.jit(with_gradients(attention(implementation, SCALE, place)))(*inputs, None, dy)
    assert_close(found, expected, EXACT)


@pytest.mark.parametrize("split", ["nothing", "length"])
@pytest.mark.parametrize("implementation", ["reference", "blocks", "xla", "splash"])
def test_a_token_changes_nothing_before_it(implementation, split):
    q, k, v, _ = arrays(1, 256, 2, 1, K)
    compute = jax.jit(attention(implementation, SCALE, layout_of(split)))
    for m in (1, 127, 128, 255):
        before = np.asarray(compute(q, k, v, None))
        after = np.asarray(compute(*(x.at[:, m].add(1) for x in (q, k, v)), None))
        np.testing.assert_array_equal(after[:, :m], before[:, :m])
        assert (after[:, m:] != before[:, m:]).any(axis=(0, 2, 3)).all()


@pytest.mark.parametrize("implementation", ["reference", "blocks", "xla", "splash"])
def test_a_device_has_the_scores_of_its_own_queries_alone(implementation):
    split, (batch, length, heads, key_heads, width) = layout(1, 2, 4), (3, 512, 10, 2, K)
    q, k, v, dy = arrays(batch, length, heads, key_heads, width)
    args = q, k, v, documents(batch, length), dy
    names = [("batch", "length", name, None) for name in ("heads", "kv_heads", "kv_heads", "", "heads")]
    shardings = tuple(lies(split, *axes[: x.ndim]) for x, axes in zip(args, names, strict=True))
    both = with_gradients(attention(implementation, SCALE, split))
    program = text_of(jax.jit(both, in_shardings=shardings).lower(*args).compile())
    shapes = [tuple(map(int, dims.split(","))) for dims in re.findall(r"\w\[([\d,]+)\]", program)]
    assert not [shape for shape in shapes if sum(size == length for size in shape) > 1]
    assert any({length // 4, length} <= set(shape) for shape in shapes) or implementation == "splash"
    gathered = set(re.findall(r"= (\S+?)\{\S* all-gather\(", program))
    assert gathered == {f"f32[{batch},{length},{key_heads // 2},{width}]", f"s32[{batch},{length}]"}
    assert "reduce-scatter(" in program and "all-reduce(" not in program


KEPT = {
    "reference": [(B, L, H, K)],
    "blocks": [(B, L, H, K)],
    "xla": [(B, L, H, K)],
    "splash": [(B, H, L, K), (B, H, L)],  # y as the kernel gave it, and log Σ exp
}


@pytest.mark.parametrize("implementation", KEPT)
def test_the_name_attention_keeps_what_the_backward_pass_needs(implementation):
    q, k, v, _ = arrays(B, L, H, G, K)
    compute = attention(implementation, SCALE, Layout())

    def kept(*names: str) -> list[tuple[int, ...]]:
        policy = jax.checkpoint_policies.save_only_these_names(*names)
        square = jax.checkpoint(lambda q: jnp.square(compute(q, k, v, None)), policy=policy)
        residuals = jax.tree.leaves(jax.eval_shape(lambda q: jax.vjp(square, q)[1], q))
        return sorted(x.shape for x in residuals)

    assert kept("attention") == sorted([*kept(), *KEPT[implementation]])


@pytest.mark.parametrize("length", [1, 63, 64, 65, 130, 300, 600])
def test_blocks_of_queries_are_the_whole_without_what_they_do_not_see(length):
    *inputs, dy = arrays(2, length, 4, 2, 8)
    args = (*inputs, documents(2, length), dy)
    found, expected = (with_gradients(attention(name, SCALE, Layout())) for name in ("blocks", "reference"))
    assert_close(jax.jit(found)(*args), jax.jit(expected)(*args), EXACT)


def test_blocks_of_queries_have_almost_half_of_the_scores():
    args = (*arrays(1, 1024, 1, 1, 64)[:3], None)

    def flops_of(name: Any) -> float:
        cost: Any = jax.jit(attention(name, SCALE, Layout())).lower(*args).compile().cost_analysis()
        return cost["flops"]

    assert 0.5 < flops_of("blocks") / flops_of("reference") < 0.6
    assert [blocks.block(length) for length in (1, 128, 256, 512, 1024, 4096)] == [64, 64, 128, 128, 128, 512]


def test_blocks_divide_the_window():
    assert [block(length) for length in (128, 256, 384, 640, 1152, 2048)] == [128, 256, 384, 128, 384, 512]


def test_the_mask_of_a_part_of_the_window_is_those_rows_of_the_whole():
    for segments in (None, documents(B, 24)):
        whole, part = ops.attention_mask(24, segments), ops.attention_mask(24, segments, jnp.arange(6, 12))
        np.testing.assert_array_equal(part, whole[:, 6:12])


@pytest.mark.gpu
@pytest.mark.parametrize("on_mesh", [False, True])
@pytest.mark.parametrize("key_heads", [4, 2])
def test_cudnn_is_the_reference(key_heads, on_mesh):
    if jax.default_backend() != "gpu":
        pytest.skip("no NVIDIA GPU (JAX_PLATFORMS=cuda,cpu looks for one)")
    *inputs, dy = arrays(2, 512, 4, key_heads, 64, jnp.bfloat16)
    place = layout(1, 1, 1, devices=jax.devices()[:1]) if on_mesh else Layout()
    found = jax.jit(with_gradients(partial(_whole_windows, "cudnn", place)))(*inputs, None, dy)
    exact = jax.jit(with_gradients(partial(_whole_windows, "reference", Layout())))
    expected = exact(*(x.astype(jnp.float32) for x in inputs), None, dy.astype(jnp.float32))
    assert_close([np.asarray(x, np.float32) for x in found], [np.asarray(x) for x in expected], ROUNDED)


def _whole_windows(implementation: Any, place: Layout, q: Any, k: Any, v: Any, segments: None) -> Any:
    return attend(implementation, q, k, v, segments, 64**-0.5, place)
