"""Communication of a compiled program: its collectives, their mesh axes, bytes and numbers of executions.

They are counted in the program's text, the only source: `cost_analysis()` counts a loop's body once and has
no axes. Cases to handle, on jax 0.10:

- a loop multiplies its content; TPU programs do not contain the trip count, see `Frame.trip_count`;
- an asynchronous collective is a start and a done, on TPU a chain of fusions that all repeat the operation;
- the start of a collective returns operands and results in one tuple;
- on TPU, a reduce-scatter may be a fusion that calls a computation `all-reduce-scatter`, which contains an
all-reduce;
- several collectives may be combined in one, over a tuple;
- a ragged all-to-all shows its buffers, not the size of its data;
- a loop of unknown length may not run at all: the later rounds of an expert exchange don't if loads are
equal.

XLA:CPU widens bfloat16 collectives to float32, and writes a reduce-scatter that it derived itself as an
all-reduce and a slice: count bytes on programs for a GPU or TPU.
"""

import dataclasses
import math
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Literal, get_args

from .groups import group_axes, permutation_axes, read_groups
from .hlo import Computation, Frame, HloBuffer, HloModule, Instruction, buffers, elements

CollectiveKind = Literal[
    "all-gather",
    "reduce-scatter",
    "all-reduce",
    "all-to-all",
    "collective-permute",
    "ragged-all-to-all",
    "collective-broadcast",
]
KINDS: tuple[CollectiveKind, ...] = get_args(CollectiveKind)


def ring_wire_bytes(kind: CollectiveKind, whole_bytes: int, ways: int) -> int:
    """Return the bytes that each of `ways` devices in a ring sends in one collective.

    Args:
        whole_bytes: Bytes of the whole array: the output of an all-gather, the input of a reduce-scatter, the
            data on each device for the others.

    >>> ring_wire_bytes("all-gather", 800, 8), ring_wire_bytes("all-reduce", 800, 8)
    (700, 1400)
    """
    if kind in ("collective-permute", "collective-broadcast"):
        return whole_bytes
    passes = 2 if kind == "all-reduce" else 1
    return passes * whole_bytes * (ways - 1) // ways


@dataclasses.dataclass(frozen=True)
class Collective:
    """One collective operation of a program.

    Attributes:
        axes: The mesh axes that it runs over, in the mesh's order; `axis[4 of 8]` if groups contain only a
            part of an axis.
        dtype: Dtype of the data sent; several, as `bf16+f32`, if operations were combined.
        buffer_bytes: Bytes of the whole array: the output of an all-gather, the input of a reduce-scatter,
            the data on each device for the others; of a ragged all-to-all, the larger of its two buffers.
        wire_bytes: Bytes that a device sends in one execution, by a ring. For a ragged all-to-all an upper
            bound, on average over its devices: the smaller of its send and receive buffers; exact if the
            smaller one is full and loads are equal.
        times: Executions in one run of the program.
        exact: False if `times` is uncertain: in a loop of unknown length, counted once, or in a branch of a
            conditional, counted as if all branches were taken.
        open_ended: In a loop of unknown length: `times` is for one iteration of it, and totals exclude it.
        where: Its named scope, with the compiler's transformations: `feed_forward (backward)`.
        name: Name of the instruction.
        shares: Share of each dtype in the data sent, as (type, share); the shares add up to 1.
    """

    kind: CollectiveKind
    axes: tuple[str, ...]
    dtype: str
    buffer_bytes: int
    wire_bytes: int
    times: int
    exact: bool
    where: str
    name: str
    open_ended: bool = False
    shares: tuple[tuple[str, float], ...] = ()

    @property
    def total_wire_bytes(self) -> int:
        """Return the bytes that a device sends in one run of the program."""
        return self.wire_bytes * self.times

    def total_wire_bytes_as(self, dtype: str) -> float:
        """Return the bytes of one dtype that a device sends in one run of the program, if operations on several
        dtypes were combined."""
        return self.total_wire_bytes * dict(self.shares).get(dtype, 0.0)


@dataclasses.dataclass(frozen=True)
class CollectiveTotal:
    """All collectives of one kind over the same axes.

    Attributes:
        count: Executions in one run of the program, after the compiler has combined operations.
        wire_bytes: Bytes that a device sends in one run of the program.
        exact: True if all of them are counted exactly.
    """

    kind: str
    axes: tuple[str, ...]
    count: int
    wire_bytes: int
    exact: bool


def count_collectives(text: str, mesh_shape: Mapping[str, int]) -> list[Collective]:
    """List every collective of a compiled program that leaves its device, in program order.

    Args:
        text: Output of `compiled.as_text()`.
        mesh_shape: Mesh axis to size, in the order of the mesh that the program was compiled for.

    Raises:
        ValueError: The text is not a program, or of a program for another number of devices.
    """
    module = HloModule.parse(text)
    partitions = re.search(r"\bnum_partitions=(\d+)", text[: text.find("\n\n")])
    size = math.prod(mesh_shape.values())
    if partitions is not None and int(partitions.group(1)) != size:
        raise ValueError(
            f"the program is for {partitions.group(1)} devices, the mesh {dict(mesh_shape)} has {size}; pass the mesh that it "
            f"was compiled for"
        )
    entry = Frame(module, module.computations[module.entry])
    started = frozenset(
        _chain(instruction)
        for computation in module.computations.values()
        if _starts(computation)
        for instruction in computation.instructions.values()
    )
    return list(_Reader(mesh_shape, started).read(entry))


def summarize_collectives(collectives: Iterable[Collective]) -> list[CollectiveTotal]:
    """Sum collectives by kind and axes, the most bytes first; without those in loops of unknown length."""
    groups: dict[tuple[str, tuple[str, ...]], list[Collective]] = {}
    for collective in collectives:
        if collective.open_ended:
            continue
        groups.setdefault((collective.kind, collective.axes), []).append(collective)
    totals = [
        CollectiveTotal(
            kind,
            axes,
            sum(member.times for member in members),
            sum(member.total_wire_bytes for member in members),
            all(member.exact for member in members),
        )
        for (kind, axes), members in groups.items()
    ]
    return sorted(totals, key=lambda total: -total.wire_bytes)


@dataclasses.dataclass
class _Reader:
    """Reader of a program in execution order.

    Attributes:
        started: Chains of asynchronous operations with a start in the text.
        seen: Chains encountered so far.
    """

    mesh_shape: Mapping[str, int]
    started: frozenset[str]
    seen: set[str] = dataclasses.field(default_factory=set)

    def read(
        self, frame: Frame, times: int = 1, exact: bool = True, where: str = "", open_ended: bool = False
    ) -> Iterator[Collective]:
        """Yield the collectives of a computation.

        Args:
            times: Number of executions of the computation.
            exact: True if `times` is certain.
            where: Scope of the computation, for operations without one.
            open_ended: True if it is within a loop of unknown length.
        """
        scattered = frame.computation.name.startswith("all-reduce-scatter")
        for instruction in frame.instructions():
            opcode, inside = instruction.opcode, _where(instruction) or where
            if (kind := _KIND_OF_OPCODE.get(opcode)) is not None:
                if self._repeats(instruction, frame.computation):
                    continue
                collective = _collective(instruction, kind, frame.computation, scattered, self.mesh_shape)
                if collective is not None:
                    fields = {"times": times, "exact": exact, "where": inside, "open_ended": open_ended}
                    yield dataclasses.replace(collective, **fields)
            elif opcode == "while":
                trips = frame.trip_count(instruction)
                body = frame.enter(instruction.attribute("body"), instruction.operands, instruction)
                unknown = trips is None
                yield from self.read(
                    body, times * (1 if unknown else trips), exact and not unknown, inside, open_ended or unknown
                )
            elif opcode not in ("async-done", "async-update"):
                for name in instruction.called:
                    if name in frame.module.computations:
                        called = frame.enter(name, instruction.operands)
                        yield from self.read(called, times, exact and opcode != "conditional", inside, open_ended)

    def _repeats(self, instruction: Instruction, computation: Computation) -> bool:
        """Return True for a later link of a chain: only the fusion that starts it sends, or the first if none
        is marked."""
        chain = _chain(instruction)
        if not chain:
            return False
        repeats = not _starts(computation) if chain in self.started else chain in self.seen
        self.seen.add(chain)
        return repeats


def _chain(instruction: Instruction) -> str:
    found = re.search(r'\bchain_id="([^"]*)"', instruction.attributes)
    return found.group(1) if found else ""


def _starts(computation: Computation) -> bool:
    return any('custom_call_target="AsyncCollectiveStart"' in i.attributes for i in computation.instructions.values())


_KIND_OF_OPCODE: Mapping[str, CollectiveKind] = {opcode: kind for kind in KINDS for opcode in (kind, f"{kind}-start")}


def _collective(
    instruction: Instruction,
    kind: CollectiveKind,
    computation: Computation,
    scattered: bool,
    mesh_shape: Mapping[str, int],
) -> Collective | None:
    """Return one execution of an operation; None if it stays on its device."""
    result = _result(instruction, kind)
    groups = read_groups(instruction.attributes, math.prod(mesh_shape.values()))
    if kind == "collective-permute":
        members, axes = 2, permutation_axes(groups, mesh_shape)
    else:
        members, axes = len(groups[0]), group_axes(groups, mesh_shape)
    if not axes:
        return None
    buffer_bytes = sum(buffer.size_bytes for buffer in result) * (members if kind == "reduce-scatter" else 1)
    kind = "reduce-scatter" if scattered and kind == "all-reduce" else kind
    sent = buffer_bytes
    if kind == "ragged-all-to-all":
        source = _sizes(computation, instruction.operands[0]) or buffer_bytes
        buffer_bytes, sent = max(buffer_bytes, source), min(buffer_bytes, source)
    return Collective(
        kind=kind,
        axes=axes,
        dtype="+".join(dict.fromkeys(buffer.dtype for buffer in result)),
        buffer_bytes=buffer_bytes,
        wire_bytes=ring_wire_bytes(kind, sent, members),
        times=1,
        exact=True,
        where="",
        name=instruction.name,
        shares=_shares(result),
    )


def _shares(result: list[HloBuffer]) -> tuple[tuple[str, float], ...]:
    sizes: dict[str, int] = {}
    for buffer in result:
        sizes[buffer.dtype] = sizes.get(buffer.dtype, 0) + buffer.size_bytes
    total = sum(sizes.values())
    return tuple((dtype, size / total) for dtype, size in sizes.items()) if total else ()


def _result(instruction: Instruction, kind: CollectiveKind) -> list[HloBuffer]:
    """Return the result arrays of a collective. Most starts return (operands, results, ...); that of an
    all-reduce only results."""
    if instruction.opcode == kind or kind == "all-reduce":
        return buffers(instruction.shape)
    return buffers(elements(instruction.shape)[1])


def _sizes(computation: Computation, name: str) -> int:
    """Return the bytes of an instruction's result; 0 if unknown."""
    source = computation.instructions.get(name)
    return 0 if source is None else sum(buffer.size_bytes for buffer in buffers(source.shape))


_NOISE = re.compile(
    r"jit\(.*\)|pjit|shard_map|while|body|cond|closed_call|branch_\d+_fun|checkpoint|rematted_computation|remat\d?|"
    r"custom_vjp_call\w*|custom_jvp_call\w*|core_call|"
)


def _where(instruction: Instruction) -> str:
    """Return the named scopes of an operation, with jax's additions replaced by a word in parentheses."""
    match = re.search(r'op_name="([^"]*)"', instruction.attributes)
    path = match.group(1).split("/") if match else []
    scopes, backward = [], False
    # The last part is the operation itself.
    for part in path[:-1]:
        backward |= part.startswith("transpose(")
        while wrapped := re.fullmatch(r"(?:transpose|jvp|vmap)\((.*)\)", part):
            part = wrapped.group(1)
        if not _NOISE.fullmatch(part):
            scopes.append(part)
    words = [word for word, is_set in (("backward", backward), ("again", "rematted_computation" in path)) if is_set]
    return " ".join(filter(None, ("/".join(scopes), f"({', '.join(words)})" if words else "")))
