"""`comms.over="auto"`: detection of slow mesh axes, by their measured bandwidth, or else by which of them
cross hosts.

Sums over all other axes are made first, in float32, and the results travel compressed over the slow ones: a
reduction inside hosts, then across them.
"""

import dataclasses
import json
import math
from collections.abc import Callable, Mapping

import jax
import numpy as np

from ...comms.settings import AUTO
from ...core import pair_axes
from ...core.errors import RecipeError
from ...job.agreement import broadcast_text, is_process_zero
from ...mesh import Placement
from ...mesh.rules import MESH_AXES
from ...plan.search.profile import HardwareProfile, newest_profile, profile_in, profiles_folder
from ...system import json_reader
from ...train import Program
from ..degraded_features import count_missing_processes, drop_comms

SLOW_FACTOR = 2.0
"""Factor by which the fastest axis must exceed the bandwidth of an axis for that to count as slow."""


def resolve_slow_axes(
    program: Program, placement: Placement, folder: str | None, say: Callable[[str], None] = lambda line: None
) -> Program:
    """Resolve "auto" to the slow mesh axes, and report them; return the program as it is if its settings name
    axes.

    Every process of a job calls it.

    Args:
        folder: The run's folder, in which a check may have left a profile; None without one.

    Raises:
        RecipeError: No axis is slow.
    """
    if program.comms.over != (AUTO,):
        _advise(program, placement, say)
        return program
    copies = _copies(program, placement)
    measured = _measured(placement, folder)
    if len(measured) > 1 and measured.keys() >= set(copies):
        fastest = max(measured.values())
        slow = tuple(axis for axis in copies if measured[axis] * SLOW_FACTOR < fastest)
        reason = "measured: " + ", ".join(f"{axis} {rate / 1e9:.3g} GB/s" for axis, rate in measured.items())
    else:
        slow = tuple(axis for axis in copies if crosses_hosts(placement, axis))
        reason = "there is no profile of this mesh (`panax check`); " + (
            f"{' and '.join(slow)} {'crosses' if len(slow) == 1 else 'cross'} hosts"
            if slow
            else "no axis crosses hosts"
        )
    if not slow and count_missing_processes():
        return drop_comms(program, say)
    if not slow:
        among = " and ".join(copies) or "an axis of copies, which this mesh does not have"
        raise RecipeError(
            f"comms.over=auto finds no slow axis among {among}: {reason}; name one in comms.over, or remove comms"
        )
    say(f"comms.over     {' and '.join(slow)}: {reason}")
    program = dataclasses.replace(program, comms=dataclasses.replace(program.comms, over=slow))
    _advise(program, placement, say)
    return program


def _advise(program: Program, placement: Placement, say: Callable[[str], None]) -> None:
    """Suggest a mesh that sends less across hosts, if compressed axes have several devices of a host."""
    if not program.comms.compress:
        return
    for axis in program.comms.over:
        inside, size = devices_per_process(placement, axis), placement.sizes[axis]
        if 1 < inside < size:
            hosts, fsdp = size // inside, placement.sizes["fsdp"] * inside
            say(
                f"warning: {axis}={size} joins {hosts} hosts with {inside} devices each, and all of them exchange compressed "
                f"gradients with all; --mesh.{axis} {hosts} --mesh.fsdp {fsdp} adds up inside hosts first, and sends "
                f"1/{inside} of that across them"
            )


def devices_per_process(placement: Placement, axis: str) -> int:
    """Return the number of devices along a mesh axis that belong to one process."""
    process = np.vectorize(lambda device: device.process_index)(placement.devices.devices)
    lines = np.moveaxis(process, placement.devices.axis_names.index(axis), -1).reshape(-1, placement.sizes[axis])
    return int(max(np.unique(line, return_counts=True)[1].max() for line in lines))


def crosses_hosts(placement: Placement, axis: str) -> bool:
    """Return True if neighbors along a mesh axis are devices of different processes."""
    process = np.vectorize(lambda device: device.process_index)(placement.devices.devices)
    place = placement.devices.axis_names.index(axis)
    return bool((np.diff(process, axis=place) != 0).any())


def _copies(program: Program, placement: Placement) -> tuple[str, ...]:
    """Return the axes over which every parameter's gradient is reduced."""
    named = pair_axes(program.abstract.params, program.axes.params)
    split = {
        axis
        for (_, leaf, axes), keep in zip(named, jax.tree.leaves(program.trainable))
        if keep
        for dim in placement.storage(tuple(axes), leaf.shape)
        for axis in dim
    }
    return tuple(axis for axis in MESH_AXES if placement.sizes[axis] > 1 and axis not in split)


def _measured(placement: Placement, folder: str | None) -> dict[str, float]:
    """Return the bandwidth of each axis in bytes per second, by the newest profile of these devices that the
    first process finds; empty without one."""
    kind = placement.devices.devices.flat[0].device_kind
    paths = [*([] if folder is None else [profile_in(folder)]), *sorted(profiles_folder().glob("*.json"))]
    profile = newest_profile(kind, placement.sizes, paths) if is_process_zero() else None
    rates = {} if profile is None else axis_bandwidths(profile[0], placement.sizes)
    return json_reader.parse(broadcast_text(json.dumps(rates)), constants=True)


def axis_bandwidths(profile: HardwareProfile, sizes: Mapping[str, int]) -> dict[str, float]:
    """Return the bandwidth of each axis' fastest kind of collective, in bytes per second."""
    bandwidths: dict[str, float] = {}
    for rates in profile.collectives:
        if len(rates.axes) == 1 and sizes[rates.axes[0]] > 1 and math.isfinite(rates.bandwidth):
            bandwidths[rates.axes[0]] = max(bandwidths.get(rates.axes[0], 0.0), rates.bandwidth)
    return {axis: bandwidths[axis] for axis in MESH_AXES if axis in bandwidths}
