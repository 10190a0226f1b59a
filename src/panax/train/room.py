"""Whether a run's state fits the memory of its devices, asked before a byte of it is there."""

from collections.abc import Mapping
from typing import Any

import jax

from ..core.errors import RecipeError
from ..core.target import target_of
from ..system.host_memory import free_bytes


def check_room(abstract: Any, shardings: Any) -> None:
    """See that the state has room on the devices of this process.

    A step takes more, gradients and activations: what is refused here can't even begin.

    Args:
        abstract: The state's shapes.
        shardings: How each leaf lies.

    Raises:
        RecipeError: It has none.
    """
    held = {name: _held(getattr(abstract, name), getattr(shardings, name)) for name in ("params", "optimizer_state")}
    all_held = _held(abstract, shardings)
    for device, needed in all_held.items():
        own = target_of(device).traits.own_memory
        if own:
            room = _limit(device)
        else:
            # Devices of the host share its memory.
            needed = sum(all_held.values())
            room = free_bytes()
        if room is None or needed <= room:
            continue
        parts = {name: of.get(device, 0) if own else sum(of.values()) for name, of in held.items()}
        where = f"the memory of {device.device_kind}, {_gib(room)}" if own else f"the host's free memory, {_gib(room)}"
        raise RecipeError(
            f"the state of this run is larger than {where}: it takes {_gib(needed)} there, parameters {_gib(parts['params'])} "
            f"and optimizer {_gib(parts['optimizer_state'])}, before gradients and activations. Take a smaller model, or more "
            f"devices with --mesh.fsdp; `panax inspect RECIPE --target h100x8` says what a step takes on which devices"
        )


def _limit(device: Any) -> int | None:
    """A device's memory; None where it does not tell."""
    return (device.memory_stats() or {}).get("bytes_limit")


def _held(tree: Any, shardings: Any) -> Mapping[Any, int]:
    """Bytes of the leaves on each device of this process; what lies in the host's memory beside a device is not counted."""
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
    # A key is two or four words.
    return count * getattr(dtype, "itemsize", 8)


def _gib(count: float) -> str:
    return f"{count / 2**30:.1f} GiB"
