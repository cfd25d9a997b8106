"""A compiled program's text, read: computations, their instructions, and how often each runs.

    program = read(compiled.as_text())
    program.runs    # computation → how often one step executes it: loops multiply

XLA's own cost analysis counts the body of a loop once, so nothing of it is used here. How often a loop turns is what
XLA notes on it (`known_trip_count`), which the TPU compiler does not, or else follows from its counter: `i < constant`
in the condition, where i starts (0 if that can't be seen), what a turn adds. `jax.lax.scan`, `fori_loop` and the loops
that XLA makes of a product and its collective compile to that. Another loop counts once; `unknown_loops` names it.
"""

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, field

BITS = {"pred": 8, "token": 0, "opaque": 0} | {  # of an element, by name of its type
    f"{letter}{bits}": bits for letter in "suf" for bits in (2, 4, 8, 16, 32, 64)
}
BITS |= {"bf16": 16, "c64": 64, "c128": 128}

_HEADER = re.compile(r"^(ENTRY )?%?([\w.\-]+) \(.*\{$")
_INSTRUCTION = re.compile(r"^\s+(ROOT )?%?([\w.\-]+) = ")
_OPCODE = re.compile(r"\s*([a-z][\w\-]*)\(")
_SHAPE = re.compile(r"([a-z]\w*)\[([\d,]*)\](\{[^}]*\})?")
_SPACE = re.compile(r"S\((\d+)\)")
_OPERAND = re.compile(r"%([\w.\-]+)")
_TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"\}')


@dataclass(frozen=True)
class Shape:
    """An array. `space` 0 is the main memory (HBM); others are caches, registers, the host."""

    dtype: str
    dims: tuple[int, ...]
    space: int = 0

    @property
    def elements(self) -> int:
        return math.prod(self.dims)

    @property
    def bytes(self) -> int:
        """Without the padding of tiled layouts."""
        bits = BITS.get(self.dtype, 8)  # the many float8 types
        return -(-self.elements * bits // 8)


@dataclass(frozen=True)
class Instruction:
    """`name = shapes opcode(operands), attributes`; a tuple has several shapes."""

    name: str
    opcode: str
    shapes: tuple[Shape, ...]
    operands: tuple[str, ...]
    literal: str
    attributes: str

    def attribute(self, key: str) -> str | None:
        """The word after `key=`, such as the name of a computation."""
        found = re.search(rf"\b{key}=%?([\w.\-]+)", self.attributes)
        return found[1] if found else None

    @property
    def bytes(self) -> int:
        return sum(shape.bytes for shape in self.shapes)


@dataclass
class Computation:
    """Instructions by name, in the order of the text."""

    name: str
    instructions: dict[str, Instruction] = field(default_factory=dict)
    root: str = ""

    def operands(self, instruction: Instruction) -> list[Instruction]:
        return [self.instructions[name] for name in instruction.operands if name in self.instructions]

    def users(self, name: str) -> list[Instruction]:
        return [other for other in self.instructions.values() if name in other.operands]

    def parameters(self) -> dict[int, Instruction]:
        return {int(i.literal): i for i in self.instructions.values() if i.opcode == "parameter"}


@dataclass(frozen=True)
class Program:
    """Everything of a program's text."""

    computations: dict[str, Computation]
    runs: dict[str, int]
    unknown_loops: tuple[str, ...]

    @property
    def size(self) -> int:
        """Instructions of the text."""
        return sum(len(computation.instructions) for computation in self.computations.values())

    def executed(self) -> Iterator[tuple[Computation, int]]:
        """The computations that run by themselves, not inside a fusion or as the operation of a reduction."""
        return ((self.computations[name], times) for name, times in self.runs.items())

    def fused(self, instruction: Instruction) -> Computation | None:
        """What a fusion computes."""
        return self.computations.get(instruction.attribute("calls") or "") if instruction.opcode == "fusion" else None


def read(text: str) -> Program:
    """The program of `compiled.as_text()`."""
    computations: dict[str, Computation] = {}
    entry, current = "", None
    for line in text.splitlines():
        if header := _HEADER.match(line):
            current = computations.setdefault(header[2], Computation(header[2]))
            entry = header[2] if header[1] else entry
        elif current is not None and (start := _INSTRUCTION.match(line)):
            instruction = _instruction(start[2], line[start.end() :])
            current.instructions[instruction.name] = instruction
            current.root = instruction.name if start[1] else current.root
    runs, unknown = _count_runs(computations, entry)
    return Program(computations, runs, unknown)


def _instruction(name: str, text: str) -> Instruction:
    end = _closing(text, 0) + 1 if text.startswith("(") else text.index(" ")
    opcode = _OPCODE.match(text, end)
    assert opcode, text
    close = _closing(text, opcode.end() - 1)
    inside = text[opcode.end() : close]
    return Instruction(
        name, opcode[1], tuple(_shapes(text[:end])), tuple(_OPERAND.findall(inside)), inside, text[close + 1 :]
    )


def _closing(text: str, start: int) -> int:
    """Where the bracket that opens at `start` closes."""
    depth = 0
    for match in re.compile(r"[()]").finditer(text, start):
        depth += 1 if match[0] == "(" else -1
        if depth == 0:
            return match.start()
    raise AssertionError(text)


def _shapes(text: str) -> Iterator[Shape]:
    for dtype, dims, layout in _SHAPE.findall(text):
        space = _SPACE.search(layout)
        yield Shape(dtype, tuple(int(n) for n in dims.split(",") if n), int(space[1]) if space else 0)


def _count_runs(computations: dict[str, Computation], entry: str) -> tuple[dict[str, int], tuple[str, ...]]:
    """How often each computation runs, from the entry down; a computation called from two places runs for both."""
    runs: dict[str, int] = {}
    unknown: dict[str, None] = {}

    def visit(name: str, times: int) -> None:
        if name not in computations:
            return
        runs[name] = runs.get(name, 0) + times
        for instruction in computations[name].instructions.values():
            for called, turns in _calls(computations, computations[name], instruction):
                if turns is None:
                    unknown[instruction.name] = None
                visit(called, times * (1 if turns is None else turns))

    visit(entry, 1)
    return runs, tuple(unknown)


def _calls(
    computations: dict[str, Computation], caller: Computation, instruction: Instruction
) -> Iterator[tuple[str, int | None]]:
    """The computations that an instruction runs, with how often (None: not known)."""
    if instruction.opcode == "while":
        turns = _trips(computations, caller, instruction)
        yield instruction.attribute("body") or "", turns
        yield instruction.attribute("condition") or "", turns
    elif instruction.opcode == "call":
        yield instruction.attribute("to_apply") or "", 1
    elif instruction.opcode == "async-start":
        yield instruction.attribute("calls") or "", 1
    elif instruction.opcode == "conditional":  # each branch once: more than runs
        branches = re.search(r"branch_computations=\{([^}]*)\}", instruction.attributes)
        names = _OPERAND.findall(branches[1]) if branches else []
        names += [instruction.attribute(f"{which}_computation") or "" for which in ("true", "false")]
        yield from ((name, 1) for name in names if name)


def _trips(computations: dict[str, Computation], caller: Computation, loop: Instruction) -> int | None:
    """How often a loop turns: i from `start` in steps of `step` while i < `end`."""
    if noted := _TRIPS.search(loop.attributes):
        return int(noted[1])
    condition = computations[loop.attribute("condition") or ""]
    test = condition.instructions[condition.root]
    sides = condition.operands(test)
    if test.opcode != "compare" or test.attribute("direction") != "LT" or len(sides) != 2:
        return None
    place, end = sides[0].attribute("index"), _constant(condition, sides[1])
    if sides[0].opcode != "get-tuple-element" or place is None or end is None:
        return None
    start = _element(caller, caller.operands(loop)[0], int(place))
    step = _step(computations[loop.attribute("body") or ""], int(place))
    first = _constant(caller, start) if start is not None else None
    return max(0, -(-(end - (first or 0)) // step)) if step else None


def _element(computation: Computation, value: Instruction, place: int) -> Instruction | None:
    """An element of a tuple that is made right here."""
    return computation.operands(value)[place] if value.opcode == "tuple" else None


def _step(body: Computation, place: int) -> int | None:
    """What one turn adds to the counter at `place` of the loop's tuple; None if that is not plain to see."""
    value, step = _element(body, body.instructions[body.root], place), 0
    while value is not None and (value := _origin(body, value)).opcode == "add":
        one, two = (_origin(body, operand) for operand in body.operands(value))
        value, added = (one, _constant(body, two)) if two.opcode == "constant" else (two, _constant(body, one))
        if added is None:
            return None
        step += added
    counts = value is not None and value.opcode == "get-tuple-element" and value.attribute("index") == str(place)
    return step if counts and step > 0 else None


def _origin(computation: Computation, value: Instruction) -> Instruction:
    """The value that a copy is of."""
    while value.opcode in ("copy", "bitcast", "copy-done", "copy-start"):
        (value,) = computation.operands(value)
    return value


def _constant(computation: Computation, value: Instruction) -> int | None:
    """The number that a scalar is, if it is one."""
    value = _origin(computation, value)
    return int(value.literal) if value.opcode == "constant" and re.fullmatch(r"-?\d+", value.literal) else None
