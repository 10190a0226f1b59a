"""Parser for the text of a compiled program, sufficient to find its operations and their trip counts.

The text is the output of `compiled.as_text()`. The language is the same for every platform, with three
peculiarities that matter here: only CPU and GPU programs contain trip counts, arrays may be wrapped in
tuples, and computations are called from fusions, loops, conditionals and asynchronous starts alike.
"""

import dataclasses
import re
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from ..core.errors import suggest_name

BITS = {
    "pred": 8, "s2": 2, "u2": 2, "s4": 4, "u4": 4, "s8": 8, "u8": 8, "s16": 16, "u16": 16, "s32": 32, "u32": 32, "s64": 64,
    "u64": 64, "f4e2m1fn": 4, "f8e3m4": 8, "f8e4m3": 8, "f8e4m3fn": 8, "f8e4m3b11fnuz": 8, "f8e4m3fnuz": 8, "f8e5m2": 8,
    "f8e5m2fnuz": 8, "f8e8m0fnu": 8, "f16": 16, "bf16": 16, "f32": 32, "f64": 64, "c64": 64, "c128": 128, "token": 0,
}  # fmt: skip

_HEAD = re.compile(r"^(ENTRY )?%?([\w.\-]+) \(.*\{$")
_INSTRUCTION = re.compile(r"^\s+(ROOT )?%?([\w.\-]+) = ")
_OPCODE = re.compile(r"\s*([\w\-]+)\(")
_CALLED = re.compile(r"\b(?:calls|to_apply|body|condition|true_computation|false_computation)=%?([\w.\-]+)")
_BRANCHES = re.compile(r"\b(?:branch_computations|called_computations|calls)=\{([^}]*)\}")
_ARRAY = re.compile(r"(\w+)\[([\d,<=]*)\]")
_TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"\}')


class HloBuffer(NamedTuple):
    """An array in a program.

    Attributes:
        dtype: Dtype in the program's notation: `bf16`, `f32`.
        size_bytes: Size without the padding of a layout.
    """

    dtype: str
    size_bytes: int


@dataclasses.dataclass(frozen=True)
class Instruction:
    """One line of a program.

    Attributes:
        shape: The result's shape, as written.
        inside: The text between its parentheses, as written.
        operands: The names in it.
        attributes: The rest of the line.
    """

    name: str
    shape: str
    opcode: str
    inside: str
    attributes: str
    root: bool

    @property
    def operands(self) -> list[str]:
        named = re.findall(r"%([\w.\-]+)", self.inside)
        return named or [part.split()[-1] for part in self.inside.split(",") if part.split()]

    @property
    def called(self) -> list[str]:
        """Return the names of all computations that this instruction refers to."""
        names = _CALLED.findall(self.attributes)
        for several in _BRANCHES.findall(self.attributes):
            names += [name.strip().lstrip("%") for name in several.split(",") if name.strip()]
        return names

    def attribute(self, name: str) -> str:
        """Return the value of `name=value` up to the next comma; empty if there is none."""
        found = re.search(rf"\b{name}=%?([\w.\-]+)", self.attributes)
        return found.group(1) if found else ""


@dataclasses.dataclass
class Computation:
    name: str
    instructions: dict[str, Instruction] = dataclasses.field(default_factory=dict)

    @property
    def root(self) -> Instruction | None:
        return next((i for i in reversed(self.instructions.values()) if i.root), None)


@dataclasses.dataclass(frozen=True)
class HloModule:
    """A parsed program.

    Attributes:
        entry: Name of the entry computation.
    """

    computations: dict[str, Computation]
    entry: str

    @classmethod
    def parse(cls, text: str) -> "HloModule":
        """Parse a program's text.

        Raises:
            ValueError: The program has no entry computation.
        """
        computations: dict[str, Computation] = {}
        current, entry = None, ""
        for line in text.splitlines():
            if current is None or not line.startswith(" "):
                head = _HEAD.match(line)
                if head is not None:
                    current = computations.setdefault(head.group(2), Computation(head.group(2)))
                    entry = head.group(2) if head.group(1) else entry
                elif line.startswith("}"):
                    current = None
                continue
            instruction = _instruction(line)
            if instruction is not None:
                current.instructions[instruction.name] = instruction
        if not entry:
            raise ValueError("the text is not a compiled program: expected a computation that begins with ENTRY")
        return cls(computations, entry)


def _instruction(line: str) -> Instruction | None:
    head = _INSTRUCTION.match(line)
    if head is None:
        return None
    start = head.end()
    shape_end = _closing(line, start) if line[start] == "(" else line.find(" ", start)
    opcode = _OPCODE.match(line, shape_end)
    if shape_end < 0 or opcode is None:
        return None
    end = _closing(line, opcode.end() - 1)
    return Instruction(
        head.group(2),
        line[start:shape_end],
        opcode.group(1),
        line[opcode.end() : end - 1],
        line[end:],
        bool(head.group(1)),
    )


def _closing(text: str, opening: int) -> int:
    """Return the position after the parenthesis that closes the one at `opening`."""
    depth = 0
    for found in re.finditer(r"[()]", text[opening:]):
        depth += 1 if found.group() == "(" else -1
        if depth == 0:
            return opening + found.end()
    return len(text)


def elements(shape: str) -> list[str]:
    """Return the parts of a tuple's shape; an array is a tuple of one.

    >>> elements("((f32[2], f32[3]), f32[5]{0:T(8)})")
    ['(f32[2], f32[3])', 'f32[5]{0:T(8)}']
    """
    shape = re.sub(r"/\*.*?\*/", "", shape).strip()
    if not shape.startswith("("):
        return [shape]
    parts, depth, start = [], 0, 1
    for match in re.finditer(r"[(){}\[\],]", shape):
        sign = match.group()
        depth += 1 if sign in "({[" else -1 if sign in ")}]" else 0
        if (sign == "," and depth == 1) or (sign == ")" and depth == 0):
            parts.append(shape[start : match.start()].strip())
            start = match.end()
    return [part for part in parts if part]


def buffers(shape: str) -> list[HloBuffer]:
    """Return every array in a shape, with tuples flattened.

    Raises:
        ValueError: Its dtype is unknown.

    >>> buffers("(bf16[4,8]{1,0}, f32[])")
    [HloBuffer(dtype='bf16', size_bytes=64), HloBuffer(dtype='f32', size_bytes=4)]
    """
    arrays = []
    for dtype, dims in _ARRAY.findall(re.sub(r"/\*.*?\*/|\{[^{}]*\}", "", shape)):
        if dtype not in BITS:
            raise ValueError(
                f"a program holds an array of {dtype}, which has an unknown size; {suggest_name(dtype, BITS)}"
            )
        bits = BITS[dtype]
        for size in filter(None, dims.replace("<=", "").split(",")):
            bits *= int(size)
        arrays.append(HloBuffer(dtype, bits // 8))
    return arrays


@dataclasses.dataclass(frozen=True)
class Frame:
    """A computation as called from one instruction.

    Attributes:
        arguments: The names of its arguments, in the frame of the caller.
        loop: The loop that has it as body or condition: its single parameter is the loop's carry.
    """

    module: HloModule
    computation: Computation
    caller: "Frame | None" = None
    arguments: Sequence[str] = ()
    loop: Instruction | None = None

    def enter(self, name: str, arguments: Sequence[str] = (), loop: Instruction | None = None) -> "Frame":
        return Frame(self.module, self.module.computations[name], self, arguments, loop)

    def instructions(self) -> Iterator[Instruction]:
        return iter(self.computation.instructions.values())

    def trip_count(self, loop: Instruction) -> int | None:
        """Return how often a loop in this computation runs its body; None if unknown."""
        known = _TRIPS.search(loop.attributes)
        if known:
            return int(known.group(1))
        condition = self.enter(loop.attribute("condition"), loop.operands, loop)
        compared = _comparison(condition)
        if compared is None:
            return None
        left, right, direction = compared
        if left.carried is None and right.carried is not None:
            left, right = right, left
            direction = {"LT": "GT", "LE": "GE", "GT": "LT", "GE": "LE"}.get(direction, direction)
        if left.carried is None or right.carried is not None:
            return None
        body = self.enter(loop.attribute("body"), loop.operands, loop)
        start = _element(self, loop.operands[0], left.carried)
        after = _element(body, body.computation.root.name, left.carried) if body.computation.root else None
        if start is None or start.carried is not None or after is None or after.carried != left.carried:
            return None
        return _count(start.constant + left.constant, after.constant, right.constant, direction)


class _Value(NamedTuple):
    """A number that is known up to one element of the loop's carry: `carried + constant`."""

    carried: int | None
    constant: int


def _count(start: int, step: int, bound: int, direction: str) -> int | None:
    """Count the values that a loop's variable takes before the comparison fails."""
    if direction in ("LE", "GE"):
        bound += 1 if direction == "LE" else -1
    rising = direction in ("LT", "LE") or (direction == "NE" and step > 0)
    if step == 0 or (step > 0) != rising or (direction == "NE" and (bound - start) % step) or direction == "EQ":
        return None
    return max(0, -((start - bound) // step))


def _comparison(frame: Frame) -> tuple[_Value, _Value, str] | None:
    """Return both sides and the direction of the comparison that a condition returns."""
    root = frame.computation.root
    while root is not None and root.opcode != "compare":
        if root.opcode in ("fusion", "call") and root.called:
            frame = frame.enter(root.called[0], root.operands)
            root = frame.computation.root
        elif root.opcode in _SAME:
            root = frame.computation.instructions.get(root.operands[0])
        else:
            return None
    if root is None or len(root.operands) != 2:
        return None
    left, right = (_value(frame, name) for name in root.operands)
    return None if left is None or right is None else (left, right, root.attribute("direction"))


_SAME = ("copy", "bitcast", "convert", "reshape", "copy-done", "optimization-barrier")


def _value(frame: Frame, name: str) -> _Value | None:
    """Return the value of an instruction's number, if known."""
    instruction = frame.computation.instructions.get(name)
    if instruction is None:
        return None
    operands = instruction.operands
    if instruction.opcode == "constant":
        number = re.fullmatch(r"\s*(-?\d+)\s*", instruction.inside)
        return _Value(None, int(number.group(1))) if number else None
    if instruction.opcode in _SAME:
        return _value(frame, operands[0])
    if instruction.opcode == "copy-start":
        return _value(frame, operands[0])
    if instruction.opcode == "get-tuple-element":
        return _element(frame, operands[0], int(instruction.attribute("index")))
    if instruction.opcode == "parameter" and frame.caller is not None and frame.loop is None:
        index = int(instruction.inside)
        return _value(frame.caller, frame.arguments[index]) if index < len(frame.arguments) else None
    if instruction.opcode in ("fusion", "call") and instruction.called:
        inner = frame.enter(instruction.called[0], operands)
        return _value(inner, inner.computation.root.name) if inner.computation.root else None
    if instruction.opcode in ("add", "subtract"):
        left, right = _value(frame, operands[0]), _value(frame, operands[1])
        if left is None or right is None or (left.carried is not None and right.carried is not None):
            return None
        if instruction.opcode == "subtract":
            return None if right.carried is not None else _Value(left.carried, left.constant - right.constant)
        return _Value(left.carried if right.carried is None else right.carried, left.constant + right.constant)
    return None


def _element(frame: Frame, name: str, index: int) -> _Value | None:
    """Return the value of one element of a tuple."""
    instruction = frame.computation.instructions.get(name)
    if instruction is None:
        return None
    if instruction.opcode == "tuple":
        return _value(frame, instruction.operands[index])
    if instruction.opcode in _SAME:
        return _element(frame, instruction.operands[0], index)
    if instruction.opcode == "fusion" and instruction.called:
        inner = frame.enter(instruction.called[0], instruction.operands)
        return _element(inner, inner.computation.root.name, index) if inner.computation.root else None
    if instruction.opcode == "while":
        return _element(frame, instruction.operands[0], index) if _unchanged(frame, instruction, index) else None
    if instruction.opcode != "parameter" or frame.caller is None:
        return None
    if frame.loop is None:
        return _element(frame.caller, frame.arguments[int(instruction.inside)], index)
    if _unchanged(frame.caller, frame.loop, index):
        return _element(frame.caller, frame.arguments[0], index)
    return _Value(index, 0)


def _unchanged(frame: Frame, loop: Instruction, index: int) -> bool:
    """Return True if a loop carries an element unchanged, as for constants hoisted out of it."""
    body = frame.module.computations[loop.attribute("body")]
    passed = body.root
    if passed is None or passed.opcode != "tuple":
        return False
    element = body.instructions.get(passed.operands[index])
    while element is not None and element.opcode in _SAME:
        element = body.instructions.get(element.operands[0])
    if element is None or element.opcode != "get-tuple-element" or element.attribute("index") != str(index):
        return False
    source = body.instructions.get(element.operands[0])
    return source is not None and source.opcode == "parameter"
