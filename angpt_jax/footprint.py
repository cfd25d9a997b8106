"""Memory of a compiled train step on one chip: what lies there between steps, what a step needs beside it."""

import math
from dataclasses import dataclass
from typing import Any

import jax

from angpt_jax import chips
from angpt_jax.chips import GIB
from angpt_jax.layout import Device


@dataclass(frozen=True)
class Footprint:
    """Bytes on one chip.

    Args:
        parameters: from their shapes and shardings
        optimizer_state: the same
        batch: the same
        arguments: all three, as the compiler lays them out: padding of tiled layouts shows
        outputs: results that do not take the place of an argument
        temporaries: room for what a step needs beside them; less is in use at a time
        program: the code
        peak: the most that is in use at a time
    """

    parameters: int
    optimizer_state: int
    batch: int
    arguments: int
    outputs: int
    temporaries: int
    program: int
    peak: int


def bytes_of(tree: Any) -> int:
    """On one chip, of a tree of shapes with shardings, without padding."""
    return sum(math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize for x in jax.tree.leaves(tree))


def whole_bytes_of(tree: Any) -> int:
    """On all chips together, each array once."""
    return sum(math.prod(x.shape) * x.dtype.itemsize for x in jax.tree.leaves(tree))


def footprint(compiled: Any, abstract: Any) -> Footprint | None:
    """Of a compiled step from the state `abstract` (with shardings); None where the backend does not tell.

    The peak is the program's code and the smaller of two bounds: arguments + outputs + temporaries, and on a TPU the
    compiler's own peak. The first counts gaps between temporaries (it has been seen to exceed the memory of a chip for
    which the compiler found the same program small enough), the second also what lies in the chip's cache, up to
    128 MiB. On a CPU the compiler's peak leaves out temporaries and is not used.
    """
    memory = compiled.memory_analysis()
    if memory is None:
        return None
    (_, batch), _ = compiled.args_info
    (_, lies), _ = compiled.input_shardings
    shaped = jax.tree.map(lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), batch, lies)
    outputs = memory.output_size_in_bytes - memory.alias_size_in_bytes
    in_use = memory.argument_size_in_bytes + outputs + memory.temp_size_in_bytes
    (device, *_) = abstract.step.sharding.device_set
    if device.platform == "tpu":
        in_use = min(in_use, memory.peak_memory_in_bytes)
    return Footprint(
        parameters=bytes_of(abstract.params),
        optimizer_state=bytes_of(abstract.opt_state),
        batch=bytes_of(shaped),
        arguments=memory.argument_size_in_bytes,
        outputs=outputs,
        temporaries=memory.temp_size_in_bytes,
        program=memory.generated_code_size_in_bytes,
        peak=in_use + memory.generated_code_size_in_bytes,
    )


def memory_of(device: Device) -> int | None:
    """Bytes that a program can use there: what a device that is here says, or else the table of chips; None if neither
    knows."""
    stats = device.memory_stats() if device in jax.local_devices() else None
    chip = chips.find(device.device_kind)
    return stats["bytes_limit"] if stats else chip and chip.hbm_bytes


ROWS = {  # of the table: field, words, remark
    "parameters": ("parameters", ""),
    "optimizer_state": ("optimizer state", ""),
    "batch": ("batch", ""),
    "arguments": ("arguments", "the three above, with the padding of their layouts"),
    "outputs": ("outputs", "that do not take the place of an argument"),
    "temporaries": ("temporaries", "room for them; less is in use at a time"),
    "program": ("program", ""),
    "peak": ("peak", "the most in use at a time"),
}


def lines(found: Footprint | None, limit: int | None) -> list[str]:
    """As a table; `limit` is the memory that a program can use there, None if unknown."""
    if found is None:
        return ["memory of the compiled step: unknown for this backend"]
    table = [row(words, getattr(found, name), remark) for name, (words, remark) in ROWS.items()]
    return ["memory of the compiled step, on each chip", *table, *against(found.peak, limit)]


def against(peak: int | None, limit: int | None) -> list[str]:
    """The last line of the table: what the chip has."""
    if limit is None:
        return ["  the chip's        unknown for this device"]
    return [row("the chip's", limit, f"{peak / limit:.1%} used" if peak is not None else "")]


def row(words: str, size: int | None, remark: str = "") -> str:
    """`  parameters          0.118 GiB  remark`."""
    shown = "–".rjust(9) + "    " if size is None else f"{size / GIB:9.3f} GiB"
    return f"  {words:<16} {shown}  {remark}".rstrip()
