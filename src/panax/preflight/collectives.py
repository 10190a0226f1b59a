"""Latency and bandwidth of a step's collectives over each mesh axis."""

import dataclasses
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from ..job.agreement import gather_ints
from ..mesh.rules import MeshAxes
from ..plan.collectives import CollectiveKind, ring_wire_bytes
from ..plan.walk.traffic import Traffic
from .devices import time_executions

FIRST_BYTES = 2**18
"""Size of the first message; its time determines the largest size that fits the time limit."""

LARGEST_BYTES = {"cpu": 2**22}
_LARGEST_ELSEWHERE = 2**28

SECONDS = 0.15
"""Maximum seconds of one execution of a large collective, estimated from the first one."""

DEFAULT_KINDS: tuple[CollectiveKind, ...] = ("all-gather", "reduce-scatter", "all-reduce")
"""Collectives to measure if no recipe defines them."""

_MEASURED_AS: Mapping[CollectiveKind, CollectiveKind] = {
    "ragged-all-to-all": "all-to-all",
    "collective-broadcast": "all-gather",
}
"""Kinds that don't run everywhere, with the kind that takes the same way through the network."""


@dataclasses.dataclass(frozen=True)
class CollectiveUse:
    """A kind of collective over one or more mesh axes that a run will use.

    Attributes:
        sent_bytes: Approximate bytes sent by each device in one execution.
    """

    kind: CollectiveKind
    axes: MeshAxes
    sent_bytes: int


@dataclasses.dataclass(frozen=True)
class CollectiveFigures:
    """Figures of one collective, as one process measured them.

    Attributes:
        sent_bytes: Bytes sent by each device in a large collective.
        small_seconds: Time of the fastest execution that sends almost nothing.
        large_seconds: Time of the fastest large execution.
    """

    kind: CollectiveKind
    axes: MeshAxes
    ways: int
    sent_bytes: int
    small_seconds: float
    large_seconds: float


def summarize_uses(traffic: Iterable[Traffic]) -> list[CollectiveUse]:
    """Return the collectives of a step, by kind and axes; the size is that of the messages that carry most of
    the bytes."""
    groups: dict[tuple[CollectiveKind, MeshAxes], list[Traffic]] = {}
    for one in traffic:
        groups.setdefault((_MEASURED_AS.get(one.kind, one.kind), one.axes), []).append(one)
    return [
        CollectiveUse(kind, axes, max(parts, key=lambda part: part.wire_bytes).sent)
        for (kind, axes), parts in sorted(groups.items(), key=lambda item: (item[0][1], item[0][0]))
    ]


def default_uses(sizes: Mapping[str, int]) -> list[CollectiveUse]:
    """Return the usual collectives over each axis above size 1."""
    return [CollectiveUse(kind, (axis,), 2**24) for axis, size in sizes.items() if size > 1 for kind in DEFAULT_KINDS]


def measure_collective(mesh: Mesh, use: CollectiveUse) -> CollectiveFigures:
    """Time one kind of collective over its axes; all processes of the mesh call this together."""
    ways = math.prod(mesh.shape[axis] for axis in use.axes)
    platform = mesh.devices.flat[0].platform
    largest = min(max(use.sent_bytes, FIRST_BYTES), LARGEST_BYTES.get(platform, _LARGEST_ELSEWHERE))
    small, _ = _timed(mesh, use, 0)
    seconds, sent = _timed(mesh, use, FIRST_BYTES)
    # The same in every process: the slowest of them decides.
    slowest = int(gather_ints(min(round(seconds * 1e6), 2**31 - 1)).max()) / 1e6
    affordable = int(FIRST_BYTES * SECONDS / max(slowest, 1e-6))
    if min(largest, affordable) > 2 * FIRST_BYTES:
        # A power of two, so that few programs are compiled.
        seconds, sent = _timed(mesh, use, 1 << (min(largest, affordable).bit_length() - 1))
    return CollectiveFigures(use.kind, use.axes, ways, sent, small, seconds)


def _timed(mesh: Mesh, use: CollectiveUse, sent: int) -> tuple[float, int]:
    """Return (the seconds of the fastest of several executions, the bytes that a device sends)."""
    program, x, sent = collective_program(mesh, dataclasses.replace(use, sent_bytes=sent))
    return min(time_executions(program, x)), sent


def collective_program(mesh: Mesh, use: CollectiveUse) -> tuple[Callable[[jax.Array], jax.Array], jax.Array, int]:
    """Return a program that is one collective, its argument, and the bytes that a device sends in it."""
    ways = math.prod(mesh.shape[axis] for axis in use.axes)
    elements = _elements(use.kind, ways, use.sent_bytes)
    spec = P(mesh.axis_names)
    program = jax.jit(
        jax.shard_map(
            lambda x: _collective(use.kind, use.axes, ways, x),
            mesh=mesh,
            in_specs=spec,
            out_specs=spec,
            check_vma=False,
        )
    )
    return program, filled_array(mesh, elements), _sent(use.kind, ways, 4 * elements)


def filled_array(mesh: Mesh, elements: int) -> jax.Array:
    """Return an array of zeros with `elements` elements on each device of a mesh."""
    sharding = NamedSharding(mesh, P(mesh.axis_names))
    part = np.zeros(elements, np.float32)
    return jax.make_array_from_callback((mesh.size * elements,), sharding, lambda _: part)


def _collective(kind: CollectiveKind, axes: MeshAxes, ways: int, x: jax.Array) -> jax.Array:
    if kind == "all-gather":
        return lax.all_gather(x, axes, axis=0, tiled=True)
    if kind == "reduce-scatter":
        return lax.psum_scatter(x, axes, scatter_dimension=0, tiled=True)
    if kind == "all-reduce":
        return lax.psum(x, axes)
    if kind == "all-to-all":
        return lax.all_to_all(x, axes, split_axis=0, concat_axis=0, tiled=True)
    assert kind == "collective-permute", kind
    return lax.ppermute(x, axes, [(i, (i + 1) % ways) for i in range(ways)])


def _elements(kind: CollectiveKind, ways: int, sent: int) -> int:
    """Return the number of 4-byte elements on each device for `sent` sent bytes; a multiple of `ways` if they
    are divided."""
    if kind == "collective-permute":
        return max(1, sent // 4)
    if kind == "all-gather":
        return max(1, sent // (4 * (ways - 1)))
    elements = sent * ways // (ways - 1) // (2 if kind == "all-reduce" else 1)
    return max(1, elements // (4 * ways)) * ways


def _sent(kind: CollectiveKind, ways: int, block_bytes: int) -> int:
    """Return the bytes that a device sends of a block, counted for a ring."""
    return ring_wire_bytes(kind, block_bytes * ways if kind == "all-gather" else block_bytes, ways)


def slowest_figures(figures: Sequence[Sequence[Any]]) -> list[CollectiveFigures]:
    """Return, for each collective, the figures of the slowest process: a step waits for it.

    Args:
        figures: Figures of each process, with the same collectives in the same order.
    """
    return [
        dataclasses.replace(
            each[0],
            small_seconds=max(one.small_seconds for one in each),
            large_seconds=max(one.large_seconds for one in each),
        )
        for each in zip(*figures)
    ]
