"""What is read off a program's text, against sizes by hand: programs compiled here, on eight virtual devices."""

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, PartitionSpec

from angpt_jax import chips
from angpt_jax.ahead import batch_search, collectives, costs, hlo, step
from angpt_jax.ahead.collectives import Collective, Places
from angpt_jax.ahead.roofline import Work, roofline

A, B = 4, 2  # sizes of the mesh's axes
PLACES = Places(("a", "b"), (A, B), (0, 0, 0, 0, 1, 1, 1, 1))  # axis a goes from one slice to the other
ROWS, COLUMNS = 8, 128  # of the array on each device
SIZE = ROWS * COLUMNS * 4  # its bytes

shift = [(i, (i + 1) % A) for i in range(A)]
OPERATIONS: dict[str, tuple[Callable[[Any], Any], str, int, float]] = {  # kind: what, axes, chips, bytes that one sends
    "all-reduce": (lambda x: jax.lax.psum(x, "a"), "a", A, 2 * SIZE * (A - 1) / A),
    "all-gather": (lambda x: jax.lax.all_gather(x, "b", tiled=True)[:ROWS], "b", B, SIZE * (B - 1)),
    "reduce-scatter": (
        lambda x: jnp.tile(jax.lax.psum_scatter(x, ("a", "b"), tiled=True), (A * B, 1)),
        "a+b",
        A * B,
        SIZE * (A * B - 1) / (A * B),
    ),
    "collective-permute": (lambda x: jax.lax.ppermute(x, "a", shift), "a", 2, SIZE),
    "all-to-all": (lambda x: jax.lax.all_to_all(x, "a", 0, 0, tiled=True), "a", A, SIZE * (A - 1) / A),
}


def text_of(f: Callable[[Any], Any], **options: str | bool) -> str:
    """The program of `f` of each device's part."""
    mesh = jax.make_mesh((A, B), ("a", "b"), axis_types=(AxisType.Auto,) * 2)
    split = PartitionSpec(("a", "b"))
    mapped = jax.jit(jax.shard_map(f, mesh=mesh, in_specs=split, out_specs=split, check_vma=False))
    x = jax.ShapeDtypeStruct((ROWS * A * B, COLUMNS), jnp.float32)
    return str(mapped.lower(x).compile(compiler_options=options).as_text())


def found(f: Callable[[Any], Any]) -> list[Collective]:
    return collectives.collectives(hlo.read(text_of(f)), PLACES)


@pytest.mark.parametrize("kind", OPERATIONS)
def test_a_collective_by_itself(kind: str):
    operation, axes, size, sent = OPERATIONS[kind]
    (one,) = found(operation)
    assert (one.kind, one.axes, one.group, one.times) == (kind, axes, size, 1)
    assert one.across == ("a" in axes)
    assert (one.operand_bytes, one.sent_bytes) == (SIZE, sent)
    assert one.whole_bytes == (B * SIZE if kind == "all-gather" else SIZE)


@pytest.mark.parametrize("kind", OPERATIONS)
def test_loops_multiply(kind: str):
    operation, _, _, sent = OPERATIONS[kind]

    def inner(x: Any) -> Any:
        return jax.lax.scan(lambda x, _: (operation(jnp.sin(x)), None), x, length=3)[0]

    (one,) = found(lambda x: jax.lax.fori_loop(2, 7, lambda i, x: inner(x), x))
    assert (one.kind, one.times, one.sent_bytes) == (kind, 5 * 3, 5 * 3 * sent)


def test_collectives_of_one_chip_send_nothing():
    assert found(lambda x: jax.lax.ppermute(x, "a", [(i, i) for i in range(A)])) == []


def test_a_loop_of_unknown_length_counts_once_and_is_named():
    program = hlo.read(
        text_of(lambda x: jax.lax.while_loop(lambda x: x[0, 0] < 5, lambda x: jax.lax.psum(jnp.sin(x), "a"), x))
    )
    assert len(program.unknown_loops) == 1
    assert [one.times for one in collectives.collectives(program, PLACES)] == [1]


@pytest.mark.parametrize(("start", "step", "times"), [(0, 1, 8), (3, 1, 5), (0, 2, 4), (1, 3, 3)])
def test_a_counter_tells_the_length_where_none_is_noted(start: int, step: int, times: int):
    """As the TPU compiler leaves it."""

    def loop(x: Any) -> Any:
        body = lambda state: (state[0] + step, jax.lax.psum(jnp.sin(state[1]), "a"))  # noqa: E731
        return jax.lax.while_loop(lambda state: state[0] < 8, body, (start, x))[1]

    text = text_of(loop, xla_disable_hlo_passes="fusion-wrapper")
    bare = text.replace("known_trip_count", "nothing")
    assert text != bare
    (one,) = collectives.collectives(hlo.read(bare), PLACES)
    assert one.times == times


def test_groups_in_all_their_spellings():
    expected = [[0, 2, 4, 6], [1, 3, 5, 7]]
    for text in (
        "replica_groups={{0,2,4,6},{1,3,5,7}}, to_apply=%add",
        "replica_groups=[2,4]<=[4,2]T(1,0), to_apply=%add",
        "replica_groups=mesh['x'=4,'y'=2] {'x'}, to_apply=%add",
        "replica_groups=mesh['y'=2,'x'=4], device_ids=([4,2]T(1,0)) {'x'}, to_apply=%add",
        "replica_groups=mesh['z'=8] {'z':(1)4}, to_apply=%add",
    ):
        assert [list(group) for group in collectives.groups_of(text)] == expected, text
    assert collectives.groups_of("replica_groups=[2,4]<=[8]") == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert collectives.groups_of("replica_groups=mesh['x'=2,'y'=2,'z'=2] {'x','z'}") == [[0, 1, 4, 5], [2, 3, 6, 7]]
    assert collectives.groups_of("replica_groups=mesh['z'=8] {'z':(2)2}") == [[0, 2], [1, 3], [4, 6], [5, 7]]
    assert collectives.groups_of("source_target_pairs={{0,1},{1,0}}") == [[0, 1], [1, 0]]
    assert collectives.groups_of("replica_groups={}, to_apply=%add") == []


FUSED = """\
HloModule written_by_hand

%part (p: f32[64,8]) -> f32[8,8] {
  %p = f32[64,8]{1,0} parameter(0)
  %sum = f32[64,8]{1,0} all-reduce(%p), channel_id=1, replica_groups=[1,8]<=[8], to_apply=%add
  %zero = s32[] constant(0)
  ROOT %mine = f32[8,8]{1,0} dynamic-slice(%sum, %zero, %zero), dynamic_slice_sizes={8,8}
}

%start (q: bf16[1,8]) -> (bf16[1,8], bf16[8,8], u32[]) {
  %q = bf16[1,8]{1,0} parameter(0)
  %piece = bf16[8,8]{1,0} all-gather(%q), replica_groups=[1,8]<=[8], frontend_attributes={chain_id="0"}
  ROOT %go = (bf16[1,8]{1,0}, bf16[8,8]{1,0}, u32[]{:S(2)}) custom-call(%piece), \
custom_call_target="AsyncCollectiveStart"
}

%done (r: bf16[1,8], s: bf16[8,8]) -> bf16[8,8] {
  %r = bf16[1,8]{1,0} parameter(0)
  %s = bf16[8,8]{1,0} parameter(1)
  %piece.2 = bf16[8,8]{1,0} all-gather(%r), replica_groups=[1,8]<=[8], frontend_attributes={chain_id="0"}
  ROOT %end = bf16[8,8]{1,0} custom-call(%r, %s, %piece.2), custom_call_target="AsyncCollectiveDone"
}

ENTRY %main (x: f32[64,8], y: bf16[1,8], z: f32[64,8]) -> bf16[8,8] {
  %x = f32[64,8]{1,0:T(8,128)S(1)} parameter(0)
  %y = bf16[1,8]{1,0:T(8,128)(2,1)} parameter(1)
  %token = token[] after-all()
  %z = f32[64,8]{1,0:T(8,128)} parameter(2)
  %fetch = ((f32[64,8]{1,0:T(8,128)}), f32[2,8]{1,0:T(8,128)S(1)}, s32[]{:S(2)}) slice-start(%z), slice={[0:2], [0:8]}
  %store = (f32[64,8]{1,0}, f32[64,8]{1,0}, u32[]{:S(2)}) copy-start(%z)
  %kept = f32[8,8]{1,0} fusion(%x), kind=kCustom, calls=%part
  %sent = (f32[8,8]{1,0}, u32[], token[]) send(%kept, %token), frontend_attributes={\
_xla_megascale_target="{1:4}x{0:3}",_xla_megascale_transfer_type="ALL_REDUCE"}
  %begun = (bf16[1,8]{1,0}, bf16[8,8]{1,0}, u32[]{:S(2)}) fusion(%y), kind=kCustom, calls=%start
  %one = bf16[1,8]{1,0} get-tuple-element(%begun), index=0
  %two = bf16[8,8]{1,0} get-tuple-element(%begun), index=1
  ROOT %all = bf16[8,8]{1,0} fusion(%one, %two), kind=kCustom, calls=%done
}
"""


def test_what_the_tpu_compiler_writes_differently():
    """A fused reduce-scatter, a collective spread over fusions, and one between slices."""
    program = hlo.read(FUSED)
    scatter, send, gather = collectives.collectives(program, PLACES)
    assert (scatter.kind, scatter.sent_bytes, scatter.axes) == ("reduce-scatter", 64 * 8 * 4 * 7 / 8, "a+b")
    assert (send.kind, send.across, send.group) == ("all-reduce", True, 4)
    assert send.sent_bytes == 2 * 8 * 8 * 4 * 3 / 4
    assert (gather.kind, gather.sent_bytes, gather.whole_bytes) == ("all-gather", 7 * 8 * 2, 8 * 8 * 2)
    kept, sent, gathered = 8 * 8 * 4, 8 * 8 * 4, 8 * 2 + 8 * 8 * 2
    fetched, stored = 2 * 8 * 4, 2 * 64 * 8 * 4  # into a cache; from memory to memory
    assert costs.traffic(program) == kept + sent + gathered + fetched + stored  # x lies in a cache


LAYERS, ROWS_X, WIDTH = 6, 32, 64
STACK, STREAM = LAYERS * WIDTH * WIDTH, ROWS_X * WIDTH  # elements


def compiled(f: Callable, *shapes: tuple[int, ...]) -> hlo.Program:
    arrays = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
    return hlo.read(str(jax.jit(f).lower(*arrays).compile().as_text()))


def test_a_scan_of_products():
    program = compiled(
        lambda w, x: jax.lax.scan(lambda x, w: (x @ w, None), x, w)[0], (LAYERS, WIDTH, WIDTH), (ROWS_X, WIDTH)
    )
    assert costs.flops(program) == 2 * STACK * ROWS_X
    # Each layer is read at least once, and at most copied on the way; so is the stream. Not the stack for each layer.
    least = 4 * (STACK + LAYERS * 2 * STREAM)
    most = 4 * (3 * STACK + LAYERS * 4 * STREAM + 2 * STREAM)
    assert least <= costs.traffic(program) <= most + 1000


def test_an_update_in_place_is_not_the_whole_array():
    """The scan writes one row of the result at a time."""
    program = compiled(lambda x: jax.lax.scan(lambda c, x: (c, jnp.sin(x)), 0.0, x)[1], (1000, 64))
    assert costs.traffic(program) < 10 * 4 * 1000 * 64  # the whole, a thousand times over, would be 1000 * …


def test_batched_products_and_those_over_two_axes():
    program = compiled(lambda x, y: jnp.einsum("blhk,bmhk->bhlm", x, y), (3, 5, 2, 4), (3, 7, 2, 4))
    assert costs.flops(program) == 2 * 3 * 2 * 5 * 7 * 4
    program = compiled(lambda x, y: jnp.einsum("lhk,hkd->ld", x, y), (5, 2, 4), (2, 4, 6))
    assert costs.flops(program) == 2 * 5 * 6 * 2 * 4


@pytest.mark.parametrize(
    ("settings", "sizes"),
    [
        ({"window_strides": (1, 1), "padding": "VALID"}, (1, 1)),
        ({"window_strides": (2, 1), "padding": "SAME"}, (3, 3)),
        ({"window_strides": (1, 1), "padding": [(1, 0), (0, 2)], "lhs_dilation": (2, 3)}, (2, 3)),
        ({"window_strides": (1, 2), "padding": "VALID", "rhs_dilation": (2, 1)}, (2, 2)),
    ],
)
def test_convolutions_count_what_meets_an_input(settings: dict[str, Any], sizes: tuple[int, int]):
    """The TPU compiler writes products as convolutions, and a batch axis as a dilated one. Against a count by brute
    force: the convolution of ones counts its own terms."""
    batch, features, out = 2, 3, 5
    shapes = (batch, 8, 7, features), (*sizes, features, out)
    convolve = partial(jax.lax.conv_general_dilated, dimension_numbers=("NHWC", "HWIO", "NHWC"), **settings)
    terms = np.asarray(convolve(*(jnp.ones(shape) for shape in shapes))).sum()
    program = compiled(convolve, *shapes)
    assert costs.flops(program) == 2 * terms


def test_the_roofline_by_hand():
    chip = chips.V5E
    line = roofline(Work(197e12, 819e9 / 2, 200e9 / 4, 2 * 3.125e9), chip)
    assert (line.compute_seconds, line.memory_seconds, line.link_seconds, line.network_seconds) == (1, 0.5, 0.25, 2)
    assert (line.overlapped_seconds, line.serial_seconds, line.bound_by) == (2, 3.75, "network")
    assert line.mfu_bound == 0.5


@pytest.mark.parametrize("start", [1, 3, 10, 40])
@pytest.mark.parametrize(
    ("peak", "most"),
    [
        (lambda units: 100 + 50 * units, 2),
        (lambda units: math.ceil(100 + 50 * units + 0.3 * units**2), 5),
        (lambda units: 150 * math.ceil((100 + 50 * units) / 150), 5),
        (lambda units: 100 + round(200 * units**0.6), 6),
    ],
    ids=["line", "bend", "steps", "flattening"],
)
def test_the_search_for_the_largest_batch(peak: Callable[[int], int], most: int, start: int):
    """Few measurements, and no larger batch fits."""
    limit = 1000

    def measure(units: int) -> tuple[int, bool]:
        measured.append(units)
        return peak(units), peak(units) <= limit

    measured: list[int] = []
    units, compiles = batch_search.search((start, peak(start), peak(start) <= limit), limit, measure)
    assert peak(units) <= limit < peak(units + 1)
    assert compiles == len(measured) <= most


def test_the_search_halves_where_a_line_is_of_no_use():
    units, compiles = batch_search.search(
        (1, 150, True), 1000, lambda n: (100 + 50 * n, True) if n <= 12 else (9000, False)
    )
    assert (units, compiles) == (12, 6)


def test_the_search_is_content_with_a_percent():
    """Memory that jitters, as the compiler's does."""

    def measure(units: int) -> tuple[int, bool]:
        needed = 100 + 50 * units + 40 * (units * 37 % 97)
        return needed, needed <= 1_000_000

    units, compiles = batch_search.search((4000, *measure(4000)), 1_000_000, measure)
    assert measure(units)[1] and not measure(round(1.015 * units))[1]
    assert compiles <= 3


def test_the_search_says_when_nothing_fits():
    assert batch_search.search((4, 5000, False), 1000, lambda units: (4000 + units, False))[0] == 0


def test_the_message_of_the_compiler_tells_how_much_is_needed():
    error = step.DoesNotFit("RESOURCE_EXHAUSTED: Ran out (16.25G) exceeds available HBM (15.75G).\nmore")
    assert str(error) == "Ran out (16.25G) exceeds available HBM (15.75G)."
    assert error.needed == round(16.25 * 2**30)
