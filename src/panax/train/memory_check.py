"""Memory check of parameters and optimizer state, before they are allocated."""

from collections.abc import Mapping
from typing import Any

import jax

from ..core.errors import RecipeError
from ..core.layout.target import device_target
from ..system.host_memory import free_bytes


def check_memory(abstract: Any, shardings: Any) -> None:
    """Check that parameters and moments fit on the devices of this process.

    A step needs more, for gradients and activations; a run rejected here cannot even start.

    Args:
        abstract: The state's shapes.
        shardings: The sharding of each leaf.

    Raises:
        RecipeError: They do not fit.
    """
    params, moments = (
        _held(getattr(abstract, name), getattr(shardings, name)) for name in ("params", "optimizer_state")
    )
    # The task checks its own state, such as a replay buffer.
    for device in {*params, *moments}:
        here = (params.get(device, 0), moments.get(device, 0))
        where, room = f"the memory of {device.device_kind}", _limit(device)
        if not device_target(device).traits.own_memory:
            # Devices without their own memory share the host's.
            here = (sum(params.values()), sum(moments.values()))
            where, room = "the host's free memory", free_bytes()
        if room is None or sum(here) <= room:
            continue
        raise RecipeError(
            f"the parameters and moments of this run are larger than {where}, {_gib(room)}: they take {_gib(here[0])} and "
            f"{_gib(here[1])} there, before gradients and activations. Use a smaller model, or more devices with --mesh.fsdp; "
            f"`panax inspect RECIPE --target h100x8` reports the memory of a step on other devices"
        )


def _limit(device: Any) -> int | None:
    """Return the memory of a device; None if it is unknown."""
    return (device.memory_stats() or {}).get("bytes_limit")


def _held(tree: Any, shardings: Any) -> Mapping[Any, int]:
    """Return the bytes of the leaves on each device of this process, without leaves offloaded to host
    memory."""
    found: dict[Any, int] = {}
    for leaf, sharding in zip(jax.tree.leaves(tree), jax.tree.leaves(shardings)):
        if sharding.memory_kind not in (None, _usual_memory(sharding)):
            continue
        size = _bytes(sharding.shard_shape(leaf.shape), leaf.dtype)
        for device in sharding.addressable_devices:
            found[device] = found.get(device, 0) + size
    return found


def _usual_memory(sharding: Any) -> str:
    return next(iter(sharding.device_set)).default_memory().kind


def _bytes(shape: tuple[int, ...], dtype: Any) -> int:
    count = 1
    for size in shape:
        count *= size
    # A PRNG key has two or four words.
    return count * getattr(dtype, "itemsize", 8)


def _gib(count: float) -> str:
    return f"{count / 2**30:.1f} GiB"
