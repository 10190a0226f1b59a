"""Initialization of the state, after a check that its parameters and moments fit in memory."""

from collections.abc import Callable, Mapping
from typing import Any

import equinox as eqx
import jax

from ..core import TrainState
from ..core.errors import RecipeError
from ..core.layout.target import device_target
from ..core.params.module import init_sequentially
from ..mesh import Placement
from ..system.host_memory import free_bytes
from .program import Program


class StateInitializer:
    """Initializes a program's state on a mesh, directly into its shards."""

    def __init__(
        self, program: Program, placement: Placement, shardings: TrainState, options: Mapping[str, Any] | None
    ):
        """Prepare the programs, which are compiled on first use.

        Args:
            options: Options of the compiler.
        """
        self._program, self._shardings = program, shardings
        self._in_turn = placement.sizes.get("stage", 1) == 1
        self._options = None if options is None else dict(options)
        self._create = jax.jit(
            program.initial_state, out_shardings=shardings, compiler_options=self._options, donate_argnums=1
        )

    def init(self, seed: int, initial_values: tuple[Any, Any] | None) -> TrainState:
        """Initialize the state; see `CompiledStep.init`."""
        if initial_values is not None:
            return self._create(jax.random.key(seed), initial_values)
        check_memory(self._program.abstract, self._shardings)
        return self._call(self._create, seed)

    def init_params(self, seed: int, mask: Any) -> Any:
        """Initialize the parameters that `mask` selects; see `CompiledStep.init_params`."""
        check_memory(self._program.abstract, self._shardings)
        if not any(jax.tree.leaves(mask)):
            return eqx.filter(mask, False)

        def create(key: jax.Array) -> Any:
            return eqx.filter(self._program.initial_state(key).params, mask)

        places = eqx.filter(self._shardings.params, mask)
        with init_sequentially(self._in_turn):
            return jax.jit(create, out_shardings=places, compiler_options=self._options)(jax.random.key(seed))

    def trace(self, seed: int) -> Any:
        """Trace the program of `init`."""
        return self._call(self._create.trace, seed)

    def _call(self, function: Callable[..., Any], seed: int) -> Any:
        given = self._program.task.load_initial((self._shardings.params, self._shardings.model_state))
        with init_sequentially(self._in_turn):
            return function(jax.random.key(seed), given)


def check_memory(abstract: Any, shardings: Any) -> None:
    """Check that parameters and moments fit on the devices of this process.

    A step needs more, for gradients and activations; a run rejected here cannot even start.

    Args:
        abstract: The state's shapes.
        shardings: The sharding of each leaf.

    Raises:
        RecipeError: The parameters and moments do not fit.
    """
    params, moments = (
        _bytes_by_device(getattr(abstract, name), getattr(shardings, name)) for name in ("params", "optimizer_state")
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


def _bytes_by_device(tree: Any, shardings: Any) -> Mapping[Any, int]:
    """Return the bytes of the leaves on each device of this process, without leaves offloaded to host
    memory."""
    device_bytes: dict[Any, int] = {}
    for leaf, sharding in zip(jax.tree.leaves(tree), jax.tree.leaves(shardings)):
        if sharding.memory_kind not in (None, _usual_memory(sharding)):
            continue
        size = _bytes(sharding.shard_shape(leaf.shape), leaf.dtype)
        for device in sharding.addressable_devices:
            device_bytes[device] = device_bytes.get(device, 0) + size
    return device_bytes


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
