"""FLOPs and memory traffic of a compiled program, loops multiplied.

FLOPs are those of matrix products, 2 for each multiplication: `dot`, and `convolution`, which is what the TPU compiler
makes of one. Products inside kernels (splash attention, cuBLAS) are not in the text and not counted.

Traffic is what instructions that run by themselves read from and write to the main memory (HBM): operands and results
of a fusion, not what is inside it; arrays that the TPU compiler keeps in a cache (memory space S(1)) are free. Of an
array that is only sliced, the slices count, and of one that is updated in place, the update: in a scan over layers that
is one layer's part of a stacked array. What a kernel reads twice counts once, padding of tiled layouts not at all.
"""

import math
import re
from collections.abc import Sequence

from angpt_jax.ahead.collectives import is_piece, kind_of
from angpt_jax.ahead.hlo import Computation, Instruction, Program, Shape

FREE = {
    *("parameter", "constant", "tuple", "get-tuple-element", "bitcast", "while", "call", "conditional", "after-all"),
    *("partition-id", "replica-id", "opt-barrier", "optimization-barrier", "async-start"),
}
FREE_CALLS = ("AllocateBuffer", "ConcatBitcast", "AsyncCollectiveStart", "AsyncCollectiveDone")
SLICES = ("dynamic-slice", "slice", "gather")
UPDATES = {"dynamic-update-slice": 1, "scatter": 2}  # in place; which operand holds the update


def flops(program: Program) -> int:
    """Of all matrix products of one step, on one chip."""
    return sum(times * _flops_of(program, computation) for computation, times in program.executed())


def _flops_of(program: Program, computation: Computation) -> int:
    total = 0
    for instruction in computation.instructions.values():
        inner = program.fused(instruction)
        if inner is not None:
            total += _flops_of(program, inner)
        elif instruction.opcode == "dot":
            total += _dot_flops(computation, instruction)
        elif instruction.opcode == "convolution":
            total += _convolution_flops(computation, instruction)
    return total


def _dot_flops(computation: Computation, dot: Instruction) -> int:
    lhs = computation.operands(dot)[0].shapes[0]
    dims = re.search(r"lhs_contracting_dims=\{([\d,]*)\}", dot.attributes)
    contracted = math.prod(lhs.dims[int(n)] for n in dims[1].split(",") if n) if dims else 1
    return 2 * dot.shapes[0].elements * contracted


def _convolution_flops(computation: Computation, conv: Instruction) -> int:
    """2 · batch · output features · input features · the pairs of output and kernel positions that meet an input."""
    lhs, rhs = (operand.shapes[0] for operand in computation.operands(conv)[:2])
    labels = re.search(r"dim_labels=(\w+)_(\w+)->(\w+)", conv.attributes)
    assert labels, conv.attributes
    into, kernel, out = labels.groups()
    batch_groups = int(conv.attribute("batch_group_count") or 1)
    products = lhs.dims[into.index("b")] // batch_groups
    products *= rhs.dims[kernel.index("i")] * rhs.dims[kernel.index("o")]
    for axis, label in enumerate(sorted(label for label in into if label.isdigit())):
        sizes = (lhs.dims[into.index(label)], rhs.dims[kernel.index(label)], conv.shapes[0].dims[out.index(label)])
        settings = (("stride", 1), ("pad", 0), ("lhs_dilate", 1), ("rhs_dilate", 1))
        products *= _meetings(*sizes, *(_window(conv.attributes, key, default, axis) for key, default in settings))
    return 2 * products


def _window(attributes: str, key: str, default: int, axis: int) -> int:
    """A setting of one spatial axis: stride, dilation, or the padding before it."""
    text = re.search(r"window=\{([^}]*)\}", attributes)
    value = re.search(rf"\b{key}=(\S+)", text[1]) if text else None
    return int(value[1].split("x")[axis].split("_")[0]) if value else default


def _meetings(size: int, kernel: int, out: int, stride: int, pad: int, dilate: int, kernel_dilate: int) -> int:
    """Pairs (kernel position, output position) along one axis that fall on an element of the input: not on padding, nor
    on the gaps of a dilated input (so the TPU compiler writes a batch axis)."""
    if kernel == 1 and pad == 0 and dilate == 1:
        return out
    count = 0
    for k in range(kernel):
        offset = k * kernel_dilate - pad
        count += sum(
            1 for o in range(out) if (at := o * stride + offset) >= 0 and at % dilate == 0 and at // dilate < size
        )
    return count


def traffic(program: Program) -> int:
    """Bytes that one chip reads from and writes to its main memory in one step."""
    return sum(
        times * _traffic_of(program, computation, instruction)
        for computation, times in program.executed()
        for instruction in computation.instructions.values()
    )


def _traffic_of(program: Program, computation: Computation, one: Instruction) -> int:
    operands = computation.operands(one)
    given = sum(_hbm(operand.shapes) for operand in operands)
    if one.opcode in FREE or one.opcode.endswith("-done") or _is_call_of(one, FREE_CALLS):
        return 0
    inner = program.fused(one)
    if inner is not None:
        return _traffic_of_fusion(program, inner, one, operands)
    if one.opcode in SLICES:
        return _part(operands[0], one.bytes) + _hbm(one.shapes)
    if one.opcode == "dynamic-update-slice":
        return given - _hbm(operands[0].shapes) + _part(one, operands[1].bytes)
    if one.opcode in ("send", "recv"):
        return given or _hbm(one.shapes)
    if one.opcode in ("all-gather-start", "collective-permute-start"):
        return _hbm(one.shapes)  # a tuple of the operand and the result
    if one.opcode.endswith("-start") and kind_of(one) is None:  # a copy or a slice on its way: the same tuple
        ends = one.shapes[:2]
        return min(end.bytes for end in ends) * sum(end.space == 0 for end in ends)
    return given + _hbm(one.shapes)


def _traffic_of_fusion(program: Program, inner: Computation, one: Instruction, operands: list[Instruction]) -> int:
    root = inner.instructions[inner.root]
    if _is_call_of(root, ("AsyncCollectiveStart",)):
        return _hbm(one.shapes)  # the operand and the result of the collective that it starts
    parameters = inner.parameters()
    read = sum(
        min(operand.bytes, _used(program, inner, parameters[place]))
        for place, operand in enumerate(operands)
        if _hbm(operand.shapes)
    )
    results = inner.operands(root) if root.opcode == "tuple" else [root]
    if len(results) != len(one.shapes):
        return read + _hbm(one.shapes)
    return read + sum(
        min(shape.bytes, _written(program, inner, result))
        for result, shape in zip(results, one.shapes, strict=True)
        if shape.space == 0
    )


def _used(program: Program, inner: Computation, value: Instruction) -> int:
    """Bytes of an array that a fused computation reads."""
    total = 0
    for user in inner.users(value.name):
        place = user.operands.index(value.name)
        fused = program.fused(user)
        if fused is not None:
            total += _used(program, fused, fused.parameters()[place])
        elif user.opcode == "bitcast":
            total += _used(program, inner, user)
        elif user.opcode in SLICES and place == 0:
            total += user.bytes
        elif not (user.opcode in UPDATES and place == 0) and not _is_free_inside(user):
            total += value.bytes
    return total


def _written(program: Program, inner: Computation, result: Instruction) -> int:
    """Bytes of a result that a fused computation writes: none of what it hands through."""
    fused = program.fused(result)
    if fused is not None and len(result.shapes) == 1:
        return _written(program, fused, fused.instructions[fused.root])
    operands = inner.operands(result)
    if result.opcode == "bitcast":
        return _written(program, inner, operands[0])
    if result.opcode in UPDATES:
        return operands[UPDATES[result.opcode]].bytes
    if result.opcode == "parameter" or _is_free_inside(result):
        return 0
    return 0 if result.opcode == "get-tuple-element" and _is_free_inside(operands[0]) else result.bytes


def _is_free_inside(one: Instruction) -> bool:
    """Whether it belongs to a collective that another fusion starts."""
    return is_piece(one) or _is_call_of(one, FREE_CALLS)


def _is_call_of(one: Instruction, targets: tuple[str, ...]) -> bool:
    return one.opcode == "custom-call" and any(f'custom_call_target="{name}"' in one.attributes for name in targets)


def _hbm(shapes: Sequence[Shape]) -> int:
    return sum(shape.bytes for shape in shapes if shape.space == 0)


def _part(whole: Instruction, size: int) -> int:
    """`size` bytes of an array, if it lies in the main memory."""
    return size if whole.shapes[0].space == 0 else 0
