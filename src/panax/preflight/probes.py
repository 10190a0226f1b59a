"""Quick versions of a pre-flight check's measurements while a run trains, with programs compiled once."""

import dataclasses
import math
import time
from collections.abc import Callable, Mapping, Sequence

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from ..plan.collectives import CollectiveKind
from ..plan.search.profile import HardwareProfile
from .collectives import DEFAULT_KINDS, CollectiveUse, collective_program
from .devices import BenchmarkSize, select_devices
from .links import exchange_program, neighbor_links, schedule_rounds

REPEATS = 2
"""Number of executions of each measurement, of which the fastest counts, after one that synchronizes all
processes."""

MATMULS_PER_BURST = 4
"""Matrix multiplications that are timed together: about 5 ms on a core, longer than a time slice, so that a
core that is shared with another program is detected."""

SIZES = {"cpu": BenchmarkSize(384, "float32", 1, 0)}
_SIZE_ELSEWHERE = BenchmarkSize(4096, "bfloat16", 4, 0)

SENT_BYTES = {"cpu": 2**18}
_SENT_ELSEWHERE = 2**24


class MatrixProbe:
    """Matrix multiplications on this process's own devices, without other processes."""

    def __init__(self) -> None:
        devices = select_devices()
        size = SIZES.get(devices[0].platform, _SIZE_ELSEWHERE)
        self.flops = 2.0 * size.rows**3 * size.chain
        a = jnp.full((size.rows, size.rows), 1 / size.rows, size.dtype)
        self._arguments = [jax.device_put(a, device) for device in devices]

        def multiplied(a: jax.Array) -> jax.Array:
            x = a
            for _ in range(size.chain):
                x = jnp.matmul(x, a, preferred_element_type=jnp.float32).astype(a.dtype)
            return x

        self._program = jax.jit(multiplied)
        self()

    def __call__(self) -> float:
        """Return the seconds of a multiplication on the slowest device, from one burst of them."""
        slowest = 0.0
        for a in self._arguments:
            start = time.perf_counter()
            for _ in range(MATMULS_PER_BURST):
                jax.block_until_ready(self._program(a))
            slowest = max(slowest, (time.perf_counter() - start) / MATMULS_PER_BURST)
        return slowest


@dataclasses.dataclass(frozen=True)
class AxisUse:
    """The collective by which a mesh axis is measured.

    Attributes:
        expected_seconds: Expected time from a hardware profile; None without one.
    """

    axis: str
    kind: CollectiveKind
    expected_seconds: float | None = None


def axis_uses(mesh: Mesh, profile: HardwareProfile | None) -> list[AxisUse]:
    """Return, for each axis that crosses processes, the collective to measure: the first usual kind that the profile has."""
    sent = SENT_BYTES.get(mesh.devices.flat[0].platform, _SENT_ELSEWHERE)
    uses = []
    for axis in axes_across_processes(mesh):
        rates_by_kind = {each.kind: each for each in profile.collectives if each.axes == (axis,)} if profile else {}
        measured: list[CollectiveKind] = [kind for kind in DEFAULT_KINDS if rates_by_kind.get(kind) is not None]
        kind = measured[0] if measured else DEFAULT_KINDS[0]
        rates = rates_by_kind.get(kind)
        uses.append(AxisUse(axis, kind, None if rates is None else rates.latency_seconds + sent / rates.bandwidth))
    return uses


def axes_across_processes(mesh: Mesh) -> list[str]:
    """Return the mesh axes along which devices of several processes are neighbors."""
    return [axis for axis in mesh.axis_names if any(len(set(row)) > 1 for row in _rows(mesh, axis))]


def axis_peers(mesh: Mesh, axis: str, process: int | None = None) -> list[int]:
    """Return the processes that take part in collectives over an axis with a process, itself included; by
    default this one."""
    process = jax.process_index() if process is None else process
    rows = _rows(mesh, axis)
    return sorted({each for row in rows if process in row for each in row})


def _rows(mesh: Mesh, axis: str) -> list[list[int]]:
    """Return the processes of each group of devices along an axis."""
    along = mesh.devices.swapaxes(mesh.axis_names.index(axis), -1).reshape(-1, mesh.shape[axis])
    return [[device.process_index for device in row] for row in along]


class AxisProbe:
    """A collective over one mesh axis, which all processes enter together."""

    def __init__(self, mesh: Mesh, use: AxisUse):
        self.use = use
        sent = SENT_BYTES.get(mesh.devices.flat[0].platform, _SENT_ELSEWHERE)
        self._program, self._arguments, self.sent_bytes = collective_program(
            mesh, CollectiveUse(use.kind, (use.axis,), sent)
        )
        self()

    def __call__(self) -> float:
        """Return the seconds of the fastest execution."""
        jax.block_until_ready(self._program(self._arguments))
        return _fastest(self._program, self._arguments)


class LinkProbe:
    """Messages between neighbors along each mesh axis, there and back: shows the slow link of an axis."""

    def __init__(self, mesh: Mesh):
        devices = mesh.devices.ravel()
        processes = [device.process_index for device in devices]
        size = SENT_BYTES.get(devices[0].platform, _SENT_ELSEWHERE)
        flat = Mesh(devices, ("device",))
        links = neighbor_links(list(mesh.shape.items()), processes, between_processes=True)
        self._rounds: list[tuple[int | None, Callable[[jax.Array], jax.Array], jax.Array]] = []
        for each in schedule_rounds(links, processes):
            reverse = [dataclasses.replace(one, source=one.target, target=one.source) for one in each]
            for directed in (each, reverse):
                target = next((processes[one.target] for one in directed if _is_mine(processes, one.source)), None)
                self._rounds.append((target, *exchange_program(flat, directed, size)))
        self()

    def __call__(self) -> dict[int, float]:
        """Measure the seconds of a message from this process to each of its neighbors; all processes of the
        mesh call it together."""
        seconds_by_process: dict[int, float] = {}
        for target, program, argument in self._rounds:
            jax.block_until_ready(program(argument))
            seconds = _fastest(program, argument)
            if target is not None:
                seconds_by_process[target] = seconds
        return seconds_by_process


def _is_mine(processes: Sequence[int], place: int) -> bool:
    return processes[place] == jax.process_index()


def _fastest(program: Callable[[jax.Array], jax.Array], argument: jax.Array) -> float:
    best = math.inf
    for _ in range(REPEATS):
        start = time.perf_counter()
        jax.block_until_ready(program(argument))
        best = min(best, time.perf_counter() - start)
    return best


def is_same_hosts(profile: HardwareProfile, hosts: Sequence[str], mesh: Mapping[str, int]) -> bool:
    """Return True if a profile was measured by these processes' hosts, in this mesh.

    Args:
        hosts: The host of each process.
    """
    theirs = [each.host for each in sorted(profile.processes, key=lambda each: each.index)]

    def above_one(sizes: Mapping[str, int]) -> dict[str, int]:
        return {axis: size for axis, size in sizes.items() if size > 1}

    return theirs == list(hosts) and above_one(profile.mesh) == above_one(mesh)
