"""Assignment of devices to mesh coordinates, with the axes that communicate most on the fastest links.

`MESH_AXES` begins with the axis that needs its network least. Devices are enumerated in physical order, so
that the last axes, `context` and `tensor`, fall on neighbors: GPUs of one host, or chips of one TPU slice
joined by the interconnect. With several slices, the first axes span them.
"""

import math
import warnings
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ..core.errors import LayoutError
from ..core.layout.target import device_target

SLOW_AXES = ("replica", "stage", "fsdp")
"""Axes that may span TPU slices, in order of preference."""

FAST_AXES = ("tensor", "context", "expert")
"""Axes that communicate inside every layer, with devices that should share a host."""


def device_grid(devices: Sequence[Any], sizes: Mapping[str, int]) -> np.ndarray:
    """Arrange devices for a mesh.

    Args:
        devices: As many as the mesh has; JAX devices, or objects with their attributes.
        sizes: Mesh axis to size, slowest network first.

    Returns:
        An array of devices with one dimension per axis.

    Raises:
        LayoutError: The number of devices does not match the mesh, or no axis can span the TPU slices.
    """
    shape = tuple(sizes.values())
    if len(devices) != math.prod(shape):
        raise LayoutError(f"the mesh {_described(sizes)} has {math.prod(shape)} devices, {len(devices)} were given")
    if device_target(devices[0]).traits.rings:
        return _ring_grid(devices, sizes)
    ordered = sorted(devices, key=lambda device: (_slice(device), device.process_index, device.id))
    grid = _filled(ordered, shape)
    _warn_of_hosts(grid, sizes)
    return grid


def _filled(devices: Sequence[Any], shape: tuple[int, ...]) -> np.ndarray:
    grid = np.empty(len(devices), dtype=object)
    grid[:] = devices
    return grid.reshape(shape)


def _slice(device: Any) -> int:
    return getattr(device, "slice_index", None) or 0


def _described(sizes: Mapping[str, int]) -> str:
    return "·".join(f"{axis}={size}" for axis, size in sizes.items() if size > 1) or "of one device"


def _ring_grid(devices: Sequence[Any], sizes: Mapping[str, int]) -> np.ndarray:
    """Arrange devices by chip coordinates, so that an axis follows the rings of the interconnect."""
    from jax.experimental import mesh_utils

    across = _across_slices(devices, sizes)
    inside = {axis: size // across[axis] for axis, size in sizes.items()}
    if max(across.values()) > 1:
        return mesh_utils.create_hybrid_device_mesh(
            tuple(inside.values()), tuple(across.values()), devices, allow_split_physical_axes=True
        )
    try:
        return mesh_utils.create_device_mesh(tuple(sizes.values()), devices, allow_split_physical_axes=True)
    except (AssertionError, NotImplementedError, ValueError):
        # A subset of a slice's chips with coordinates that do not form a box.
        ordered = sorted(devices, key=lambda device: (device.process_index, device.id))
        return _filled(ordered, tuple(sizes.values()))


def _across_slices(devices: Sequence[Any], sizes: Mapping[str, int]) -> dict[str, int]:
    """Return the number of slices that each axis spans."""
    counts = Counter(_slice(device) for device in devices)
    each, remaining = next(iter(counts.values())), len(counts)
    if len(set(counts.values())) > 1:
        counts_text = ", ".join(f"slice {index} has {count}" for index, count in sorted(counts.items()))
        raise LayoutError(
            f"the devices are not spread evenly over TPU slices: {counts_text}; use the same number of each"
        )
    across = dict.fromkeys(sizes, 1)
    for axis in SLOW_AXES:
        across[axis] = math.gcd(sizes.get(axis, 1), remaining)
        remaining //= across[axis]
    if remaining > 1:
        slow_sizes = ", ".join(f"{axis}={sizes.get(axis, 1)}" for axis in SLOW_AXES)
        raise LayoutError(
            f"the mesh {_described(sizes)} does not fit {len(counts)} TPU slices of {each} devices: only "
            f"{', '.join(SLOW_AXES)} may span slices, and {slow_sizes}; use for example mesh.replica={len(counts)}"
        )
    return {axis: across[axis] for axis in sizes}


def _warn_of_hosts(grid: np.ndarray, sizes: Mapping[str, int]) -> None:
    """Warn if a fast axis crosses hosts and another mesh shape would avoid it."""
    # Identify hosts by slice index, which JAX sets per host, since a process may hold only one of a host's
    # GPUs; if all devices are one slice, identify them by process.
    slices = {_slice(device) for device in grid.flat}
    hosts = np.vectorize(_slice if len(slices) > 1 else lambda device: device.process_index, otypes=[int])(grid)
    per_host = min(Counter(hosts.ravel().tolist()).values())
    if per_host == 1 or len(np.unique(hosts)) == 1:
        return
    better, room = dict(sizes), per_host
    for axis in FAST_AXES:
        better[axis] = math.gcd(sizes.get(axis, 1), room)
        room //= better[axis]
    for axis in FAST_AXES:
        if axis not in sizes:
            continue
        lines = np.moveaxis(hosts, list(sizes).index(axis), -1).reshape(-1, sizes[axis])
        spanned = max(len(set(line)) for line in lines.tolist())
        if spanned == 1:
            continue
        moved = math.prod(sizes[fast] // better[fast] for fast in FAST_AXES if fast in sizes)
        if "fsdp" in sizes:
            better["fsdp"] = sizes["fsdp"] * moved
        warnings.warn(
            f"mesh.{axis}={sizes[axis]} spans {spanned} hosts of {per_host} devices and communicates over their network in every "
            f"layer; the mesh {_described(better)} keeps it within a host",
            stacklevel=3,
        )
        return
