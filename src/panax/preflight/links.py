"""Search for slow links: each device sends to its neighbors along each mesh axis, there and back.

An axis of n devices has n pairs of neighbors in a ring, each with two directions. They exchange in rounds:
in one round a process takes part in one exchange at most, so that its clock times that exchange alone, and
exchanges that share no process run at the same time. The number of rounds depends on how many neighbors a
process has, not on how many processes there are.
"""

import dataclasses
import math
import time
from collections.abc import Callable, Sequence

import jax
import numpy as np
from jax import lax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from ..job.agreement import gather_ints
from ..mesh.rules import MeshAxes
from .collectives import filled_array

REPEATS = 20

SIZES = {"cpu": (2**18, 2**21)}
"""Sizes of the large message in bytes, tried in this order, by platform: the last for which the slowest link
is fast enough."""

_SIZES_ELSEWHERE = (2**18, 2**22, 2**26)

SECONDS = 0.02
"""Time of the slowest link above which no larger message is sent."""


@dataclasses.dataclass(frozen=True)
class Link:
    """One direction between two devices that are neighbors along one or more mesh axes, by their indices in the
    mesh's order."""

    source: int
    target: int
    axes: MeshAxes


@dataclasses.dataclass(frozen=True)
class LinkFigures:
    """Figures of one direction of one link, as the sending process measured them.

    Attributes:
        small_seconds: Half the time of the fastest small message there and back.
        large_seconds: Time of the fastest large message there, with a small one back.
    """

    source: int
    target: int
    axes: MeshAxes
    sent_bytes: int
    small_seconds: float
    large_seconds: float


def neighbor_links(
    shape: Sequence[tuple[str, int]], processes: Sequence[int], *, between_processes: bool
) -> list[Link]:
    """Return the neighbors along each axis of a mesh, once for each pair of devices, or of processes.

    Args:
        shape: The mesh axes with their sizes.
        processes: The process of each device, in the mesh's order.
        between_processes: Skip neighbors in one process, and count a pair of processes once, as for
            simulated devices.

    >>> [(link.source, link.target) for link in neighbor_links([("fsdp", 3)], [0, 1, 2], between_processes=True)]
    [(0, 1), (1, 2), (2, 0)]
    """
    places = np.arange(len(processes)).reshape([size for _, size in shape])
    links: dict[tuple[int, int], Link] = {}
    for dim, (axis, size) in enumerate(shape):
        if size == 1:
            continue
        following = np.roll(places, -1, axis=dim)
        for source, target in zip(places.ravel().tolist(), following.ravel().tolist()):
            ends = (processes[source], processes[target]) if between_processes else (source, target)
            if ends[0] == ends[1]:
                continue
            key = (min(ends), max(ends))
            if key not in links:
                links[key] = Link(source, target, (axis,))
            elif axis not in links[key].axes:
                links[key] = dataclasses.replace(links[key], axes=(*links[key].axes, axis))
    return list(links.values())


def schedule_rounds(links: Sequence[Link], processes: Sequence[int]) -> list[list[Link]]:
    """Divide the links into rounds, in each of which a process has one at most.

    >>> ring = [Link(0, 1, ()), Link(1, 2, ()), Link(2, 3, ()), Link(3, 0, ())]
    >>> [[(link.source, link.target) for link in each] for each in schedule_rounds(ring, [0, 1, 2, 3])]
    [[(0, 1), (2, 3)], [(1, 2), (3, 0)]]
    """
    rounds: list[list[Link]] = []
    busy_processes: list[set[int]] = []
    for link in links:
        ends = {processes[link.source], processes[link.target]}
        at = next((number for number, each in enumerate(busy_processes) if not ends & each), len(rounds))
        if at == len(rounds):
            rounds.append([])
            busy_processes.append(set())
        rounds[at].append(link)
        busy_processes[at] |= ends
    return rounds


def measure_links(mesh: Mesh) -> list[LinkFigures]:
    """Measure the links from this process's devices; all processes of the mesh call this together."""
    devices = mesh.devices.ravel()
    processes = [device.process_index for device in devices]
    simulated = devices[0].platform == "cpu"
    links = neighbor_links(list(mesh.shape.items()), processes, between_processes=simulated)
    flat = Mesh(devices, ("device",))
    sizes = SIZES.get(devices[0].platform, _SIZES_ELSEWHERE)
    rounds = [
        directed
        for each in schedule_rounds(links, processes)
        for directed in (each, [dataclasses.replace(one, source=one.target, target=one.source) for one in each])
    ]
    small = [_timed(flat, each, 4) for each in rounds]
    large, sent = small, 4
    for size in sizes:
        large, sent = [_timed(flat, each, size) for each in rounds], size
        mine = max((seconds for seconds in large if seconds is not None), default=0.0)
        if int(gather_ints(min(round(mine * 1e6), 2**31 - 1)).max()) / 1e6 > SECONDS:
            break
    me = jax.process_index()
    return [
        LinkFigures(link.source, link.target, link.axes, sent, quick / 2, slow)
        for each, quick, slow in zip(rounds, small, large)
        for link in each
        if processes[link.source] == me and quick is not None and slow is not None
    ]


def _timed(flat: Mesh, links: Sequence[Link], size: int) -> float | None:
    """Return the seconds of the fastest exchange over the link that begins in this process; None if no link does."""
    program, x = exchange_program(flat, links, size)
    program(x).block_until_ready()
    best = math.inf
    for _ in range(REPEATS):
        start = time.perf_counter()
        program(x).block_until_ready()
        best = min(best, time.perf_counter() - start)
    devices = flat.devices.ravel()
    return best if any(devices[link.source].process_index == jax.process_index() for link in links) else None


def exchange_program(
    flat: Mesh, links: Sequence[Link], size: int
) -> tuple[Callable[[jax.Array], jax.Array], jax.Array]:
    """Return a program in which the links of one round carry `size` bytes there and four back, and its
    argument.

    Args:
        flat: All devices along the one axis `device`, in the mesh's order.
    """
    there = [(link.source, link.target) for link in links]
    back = [(target, source) for source, target in there]

    def exchange(x: jax.Array) -> jax.Array:
        return lax.ppermute(lax.ppermute(x, "device", there)[:1], "device", back)

    program = jax.jit(jax.shard_map(exchange, mesh=flat, in_specs=P("device"), out_specs=P("device"), check_vma=False))
    return program, filled_array(flat, math.ceil(size / 4))
