"""Lower bound of a step's time: its FLOPs, memory traffic and communication divided by the devices'
speeds."""

import dataclasses
import math
from collections.abc import Mapping

from ...mesh.rules import MESH_AXES, MeshAxes
from ...system.terminal_text import align_columns, format_bytes, format_elapsed
from ..walk.walk import StepCost
from .profile import HardwareProfile
from .targets import Hardware


@dataclasses.dataclass(frozen=True)
class ProfileFigures:
    """Measured speeds of a profile, for a mesh.

    Attributes:
        matrix_flops: FLOP/s of one device.
        memory_bandwidth: Bytes per second of one device.
    """

    profile: HardwareProfile
    mesh: Mapping[str, int]

    @property
    def matrix_flops(self) -> float:
        return self.profile.matrix_flops

    @property
    def memory_bandwidth(self) -> float:
        return self.profile.memory_bandwidth

    def collective_figures(self, kind: str, axes: MeshAxes) -> tuple[float, float] | None:
        """Return (bytes per second that each device sends, seconds of latency); None if not measured."""
        found = self.profile.collective(kind, axes)
        if found is None or found.ways != math.prod(self.mesh[axis] for axis in axes):
            return None
        return found.bandwidth, found.latency_seconds


@dataclasses.dataclass(frozen=True)
class DataSheet:
    """Published speeds of hardware that is not attached, with the interface of `ProfileFigures`; latencies
    are not published."""

    hardware: Hardware
    mesh: Mapping[str, int]

    @property
    def matrix_flops(self) -> float:
        return self.hardware.chip.peak_flops

    @property
    def memory_bandwidth(self) -> float:
        return self.hardware.chip.memory_bandwidth

    def collective_figures(self, kind: str, axes: MeshAxes) -> tuple[float, float] | None:
        # Devices are ordered along the last axis first: an axis spans itself and all axes after it.
        first = min(MESH_AXES.index(axis) for axis in axes)
        reach = math.prod(self.mesh.get(axis, 1) for axis in MESH_AXES[first:])
        chip = self.hardware.chip
        return chip.fast_bandwidth if reach <= self.hardware.devices_per_fast_domain else chip.slow_bandwidth, 0.0


Speeds = ProfileFigures | DataSheet


@dataclasses.dataclass(frozen=True)
class LinkTime:
    """Communication of each device over one or more mesh axes in a step.

    Attributes:
        sent: Bytes sent.
        seconds: Time of the communication; None if the speed is unknown.
    """

    axes: MeshAxes
    sent: int
    seconds: float | None


@dataclasses.dataclass(frozen=True)
class StepTime:
    """A lower bound on a step's time on each device, in seconds, by use.

    Attributes:
        compute: Its matrix multiplications at the devices' rate.
        state: Reading and writing its state once.
        communication: All of its collectives, without overlap.
        unknown: Mesh axes of unknown speed; they are not in `communication`.
        links: Parts of `communication`, the longest first.
    """

    compute: float
    state: float
    communication: float
    unknown: tuple[MeshAxes, ...] = ()
    links: tuple[LinkTime, ...] = ()

    @property
    def overlapped(self) -> float:
        """Return the time if communication and computation overlap completely."""
        return max(self.compute + self.state, self.communication)

    @property
    def sequential(self) -> float:
        """Return the time without any overlap."""
        return self.compute + self.state + self.communication


def step_time(cost: StepCost, speeds: Speeds) -> StepTime:
    """Compute the time of a traced step."""
    links: dict[MeshAxes, LinkTime] = {}
    for one in cost.traffic:
        figures = speeds.collective_figures(one.kind, one.axes)
        before = links.get(one.axes, LinkTime(one.axes, 0, 0.0))
        transfer_seconds = None if figures is None else one.wire_bytes / figures[0] + one.times.expected * figures[1]
        seconds = None if transfer_seconds is None or before.seconds is None else before.seconds + transfer_seconds
        links[one.axes] = LinkTime(one.axes, before.sent + one.wire_bytes, seconds)
    known = sorted((one for one in links.values() if one.seconds is not None), key=lambda one: -(one.seconds or 0.0))
    unknown = [one for one in links.values() if one.seconds is None]
    return StepTime(
        cost.work.flops / speeds.matrix_flops,
        2 * cost.arguments / speeds.memory_bandwidth,
        sum((one.seconds or 0.0 for one in known), 0.0),
        tuple(one.axes for one in unknown),
        (*known, *unknown),
    )


def time_lines(time: StepTime, source: str) -> list[str]:
    """Format a step's time.

    Args:
        source: Source of the figures.
    """
    lines = [
        f"time           at least {format_elapsed(time.overlapped)} a step where communication hides, "
        f"{format_elapsed(time.sequential)} where none "
        f"does: {format_elapsed(time.compute)} of matrix multiplications, "
        f"{format_elapsed(time.state)} to read and write the state once, "
        f"{format_elapsed(time.communication)} of communication",
        f"by             {source}",
    ]
    if len(time.links) > 1:
        rows = [("over", "sent by each device", "takes")]
        for one in time.links:
            takes = "" if one.seconds is None else format_elapsed(one.seconds)
            rows.append(("·".join(one.axes), format_bytes(one.sent), takes))
        lines += [f"  {line}" for line in align_columns(rows, left=1)]
    if time.unknown:
        over = ", ".join("·".join(axes) for axes in time.unknown)
        lines.append(f"  without communication over {over}, since its speed was not measured")
    return lines
