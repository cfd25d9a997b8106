"""What a compiled program sends between chips: kinds, bytes, and the mesh axes that each message runs along.

The bytes of a collective are those that one chip sends under a ring of n chips, from its operand of s bytes:

    all-gather s·(n−1)   reduce-scatter s·(n−1)/n   all-reduce 2·s·(n−1)/n   all-to-all s·(n−1)/n   permute s

Loops multiply. A start and its done are one collective. What the TPU compiler writes differently is read as what it is:
a fusion of an all-reduce with the slice that keeps one part of it is a reduce-scatter; the pieces of a collective that
is spread over several fusions (`AsyncCollectiveStart`) are one; a `send` of the multi-slice runtime is the collective
between slices that its `transfer_type` names.
"""

import itertools
import math
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from angpt_jax.ahead.hlo import Computation, Instruction, Program

KINDS = ("all-gather", "reduce-scatter", "all-reduce", "all-to-all", "collective-permute")
_IOTA = re.compile(r"\[([\d,]+)\](?:<=\[([\d,]+)\])?(?:T\(([\d,]+)\))?")
_MESH = re.compile(r"mesh\[([^\]]*)\](?:, device_ids=\(([^)]*\)?)\))? \{([^}]*)\}")
_TARGET = re.compile(r'_xla_megascale_target="\{([\d,:]*)\}')
_TRANSFER = re.compile(r'_xla_megascale_transfer_type="(\w+)"')
_OP_NAME = re.compile(r'op_name="([^"]*)"')
_PART = re.compile(r"'([^']+)'(?::\((\d+)\)(\d+))?")


@dataclass(frozen=True)
class Collective:
    """One collective of the program.

    Args:
        kind: one of KINDS
        operand_bytes: what one chip gives
        group: chips that take part with each other
        times: how often a step runs it
        axes: mesh axes that it runs along, e.g. "fsdp" or "replica+fsdp"; "" if unknown
        across: whether it leaves a slice
        source: where it comes from in the model
        shapes: what one chip gives, e.g. "bf16[1,512,32]"
    """

    kind: str
    operand_bytes: int
    group: int
    times: int
    axes: str
    across: bool
    source: str
    shapes: str

    @property
    def whole_bytes(self) -> int:
        """The largest array there is before or after: what an all-gather leaves, what a reduction takes."""
        return self.operand_bytes * (self.group if self.kind == "all-gather" else 1)

    @property
    def sent_bytes(self) -> float:
        """By one chip in one step."""
        ring = (self.group - 1) / self.group
        factor = {"all-gather": self.group - 1, "all-reduce": 2 * ring, "collective-permute": 1}.get(self.kind, ring)
        return self.times * self.operand_bytes * factor


@dataclass(frozen=True)
class Places:
    """Where the program's chips lie: mesh axes and sizes, and the slice of each chip in the order of the mesh."""

    axes: tuple[str, ...]
    sizes: tuple[int, ...]
    slices: tuple[int, ...]

    def along(self, groups: Iterable[Sequence[int]]) -> str:
        """The axes in which members of a group differ."""
        differ: set[int] = set()
        for group in groups:
            if max(group, default=0) >= math.prod(self.sizes):
                return ""
            at = np.array(np.unravel_index(np.array(group, int), self.sizes))
            differ |= set(np.nonzero((at != at[:, :1]).any(axis=1))[0].tolist())
        return "+".join(self.axes[i] for i in sorted(differ))

    def across(self, groups: Iterable[Sequence[int]]) -> bool:
        return any(len({self.slices[i] for i in group if i < len(self.slices)}) > 1 for group in groups)


def collectives(program: Program, places: Places) -> list[Collective]:
    """Those of one step, on each chip, that send something."""
    found = (
        _collective(where, what, kind, times, places, _source(what) or _source(instruction) or instruction.name)
        for computation, times in program.executed()
        for instruction in computation.instructions.values()
        for where, what, kind in _in(program, computation, instruction)
    )
    return [collective for collective in found if collective.group > 1]


def _in(program: Program, computation: Computation, one: Instruction) -> Iterator[tuple[Computation, Instruction, str]]:
    """The collective that an instruction starts, or those inside if it is a fusion: where it stands, and its kind."""
    inner = program.fused(one)
    if inner is None:
        if kind := kind_of(one):
            yield computation, one, kind
        return
    starts = any('"AsyncCollectiveStart"' in i.attributes for i in inner.instructions.values())
    for instruction in inner.instructions.values():
        for where, what, kind in _in(program, inner, instruction):
            if not is_piece(what):
                yield where, what, "reduce-scatter" if kind == "all-reduce" and _keeps_a_part(inner, what) else kind
            elif starts:
                yield where, what, kind


def kind_of(instruction: Instruction) -> str | None:
    """The kind of collective that an instruction starts, if it starts one."""
    if instruction.opcode == "send" and (transfer := _TRANSFER.search(instruction.attributes)):
        kind = transfer[1].lower().replace("_", "-")
        return kind if kind in KINDS else "collective-permute"
    kind = instruction.opcode.removesuffix("-start").replace("ragged-", "")
    return kind if kind in KINDS else None


def is_piece(instruction: Instruction) -> bool:
    """Whether it is a part of a collective that several fusions share."""
    return "chain_id=" in instruction.attributes


def _keeps_a_part(computation: Computation, reduced: Instruction) -> bool:
    """Whether of the sum only what one chip of the group keeps leaves the fusion."""
    users = computation.users(reduced.name)
    for part in [user for user in users if user.opcode == "get-tuple-element"]:
        users += computation.users(part.name)
    return bool(users) and {user.opcode for user in users} <= {"dynamic-slice", "get-tuple-element"}


def _source(instruction: Instruction) -> str:
    name = _OP_NAME.search(instruction.attributes)
    return name[1] if name else ""


def _collective(
    computation: Computation, instruction: Instruction, kind: str, times: int, places: Places, source: str
) -> Collective:
    operands = [operand for operand in computation.operands(instruction) if operand.opcode != "after-all"]
    shapes = [shape for operand in operands for shape in operand.shapes]
    if instruction.opcode == "send":
        size, axes, across = slices_of(instruction.attributes), "between slices", True
    else:
        groups = groups_of(instruction.attributes) or [range(math.prod(places.sizes))]
        moving = [group for group in groups if len(set(group)) > 1]
        size, axes, across = len(groups[0]) if moving else 1, places.along(moving[:64]), places.across(moving)
        size = 2 if kind == "collective-permute" and moving else size
    return Collective(
        kind,
        operand_bytes=sum(shape.bytes for shape in shapes),
        group=size,
        times=times,
        axes=axes,
        across=across,
        source=source,
        shapes=", ".join(f"{shape.dtype}[{','.join(map(str, shape.dims))}]" for shape in shapes),
    )


def slices_of(attributes: str) -> int:
    """How many slices a `send` of the multi-slice runtime is among: `{1,2}x{0:3}` or `{1:4}x…`."""
    target = _TARGET.search(attributes)
    count = 0
    for part in target[1].split(",") if target else []:
        first, _, last = part.partition(":")
        count += int(last or first) - int(first) + 1
    return max(count, 2)


def groups_of(attributes: str) -> Sequence[Sequence[int]]:
    """The groups of chips, by their place in the mesh: listed, as a reshaped and transposed count,
    `[2,8]<=[8,2]T(1,0)`, or as axes of a mesh, `mesh['a'=8,'b'=2] {'a'}`; the pairs of a permute. Empty: all chips."""
    if pairs := re.search(r"source_target_pairs=\{([\d,{} ]*)\}", attributes):
        return _listed(pairs[1])
    value = attributes.partition("replica_groups=")[2]
    if mesh := _MESH.match(value):
        return _of_mesh(*mesh.groups())
    if iota := _IOTA.match(value):
        return _counted(iota).tolist()
    return _listed(value[1 : value.index("}}") + 1]) if value.startswith("{{") else []


def _listed(text: str) -> Sequence[Sequence[int]]:
    return [[int(n) for n in group.split(",")] for group in re.findall(r"\{([\d,]+)\}", text)]


def _numbers(text: str) -> list[int]:
    return [int(n) for n in text.split(",")]


def _counted(iota: re.Match[str]) -> np.ndarray:
    """`[shape]<=[dims]T(order)`: 0, 1, 2, … in the shape `dims`, transposed, then in `shape`; without `<=`, the order
    stands behind the shape itself."""
    shape = _numbers(iota[1])
    dims = _numbers(iota[2]) if iota[2] else shape
    ids = np.arange(math.prod(dims)).reshape(dims)
    ids = ids.transpose(_numbers(iota[3])) if iota[3] else ids
    return ids.reshape(shape) if iota[2] else ids


def _of_mesh(axes: str, ids: str | None, over: str) -> Sequence[Sequence[int]]:
    """Groups along the axes `over` of a mesh; one can be a part of an axis, `'a':(2)4`: 4 parts behind the first 2."""
    parts = [(name, int(before or 1), int(size or 0)) for name, before, size in _PART.findall(over)]
    dims: list[int] = []
    chosen: list[int] = []
    for name, size in re.findall(r"'([^']+)'=(\d+)", axes):
        done = 1
        for before, part in sorted((before, part or int(size)) for other, before, part in parts if other == name):
            dims += [before // done, part]
            chosen.append(len(dims) - 1)
            done = before * part
        dims.append(int(size) // done)
    iota = _IOTA.match(ids) if ids else None
    flat = _counted(iota) if iota else np.array(_numbers(ids)) if ids else np.arange(math.prod(dims))
    grid = np.moveaxis(flat.reshape(dims), chosen, range(len(dims) - len(chosen), len(dims)))
    return grid.reshape(-1, math.prod(dims[i] for i in chosen)).tolist()


def grouped(found: Iterable[Collective]) -> list[tuple[str, str, list[Collective]]]:
    """(kind, axes, those of them), what sends most first."""

    def key(collective: Collective) -> tuple[str, str]:
        return collective.kind, collective.axes

    groups = [(*name, list(group)) for name, group in itertools.groupby(sorted(found, key=key), key)]
    return sorted(groups, key=lambda group: -sum(c.sent_bytes for c in group[2]))
