"""`Replay`: a ring buffer of each environment's last transitions, sharded like the environments."""

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, Key, Num

from ..core.errors import RecipeError
from ..environments import Space
from ..environments.batch import row_keys
from ..system.host_memory import free_bytes

_FAR = 2**30
"""Transitions of an environment beyond which their count is reduced."""


class Experience(NamedTuple):
    """Transitions; every leaf has the same leading axes.

    Attributes:
        observation: The observation before the step.
        action: As the agent stores it.
        terminated: True if the value of `next_observation` is 0. A time limit is not a termination, and is
            not stored.
        next_observation: The observation after the step, before any reset.
    """

    observation: Num[Array, "..."] | Bool[Array, "..."]
    action: Num[Array, "..."]
    reward: Float[Array, "..."]
    terminated: Bool[Array, "..."]
    next_observation: Num[Array, "..."] | Bool[Array, "..."]


class Replay(eqx.Module):
    """The last transitions of each environment.

    Attributes:
        experience: Every leaf is (environment, slot, ...): one ring buffer per environment; all are filled in
            step.
        added: Number of transitions that each environment has added, reduced by a multiple of the capacity
            whenever it reaches 2**30.
    """

    experience: Experience
    added: Int[Array, ""]

    @classmethod
    def create(cls, observations: Space, action: jax.ShapeDtypeStruct, environments: int, places: int) -> "Replay":
        """Create an empty buffer.

        Args:
            action: One action as the agent stores it.
            places: Capacity per environment, in transitions.
        """
        observation = observations.abstract

        def zeros(leaf: jax.ShapeDtypeStruct) -> jax.Array:
            return jnp.zeros((environments, places, *leaf.shape), leaf.dtype)

        number, flag = jax.ShapeDtypeStruct((), jnp.float32), jax.ShapeDtypeStruct((), jnp.bool_)
        return cls(
            Experience(*(zeros(leaf) for leaf in (observation, action, number, flag, observation))), jnp.int32(0)
        )

    @property
    def capacity(self) -> int:
        """Return the capacity per environment, in transitions."""
        return self.experience.reward.shape[1]

    @property
    def size(self) -> Int[Array, ""]:
        """Return the number of transitions per environment that are currently stored."""
        return jnp.minimum(self.added, self.capacity)

    def add(self, experience: Experience) -> "Replay":
        """Return the buffer with the oldest transitions replaced by new ones.

        Args:
            experience: (time, environment, ...); the number of steps must divide the capacity and be the same
                every time.
        """
        steps = experience.reward.shape[0]
        assert self.capacity % steps == 0
        start = self.added % self.capacity

        def put(ring: jax.Array, new: jax.Array) -> jax.Array:
            return jax.lax.dynamic_update_slice_in_dim(ring, jnp.moveaxis(new, 0, 1), start, axis=1)

        return Replay(jax.tree.map(put, self.experience, experience), self._advanced_count(steps))

    def add_first(self, experience: Experience) -> "Replay":
        """Return an empty buffer filled from its start with transitions of any number of steps up to its
        capacity.
        """

        def put(ring: jax.Array, new: jax.Array) -> jax.Array:
            return jax.lax.dynamic_update_slice_in_dim(ring, jnp.moveaxis(new, 0, 1), 0, axis=1)

        return Replay(jax.tree.map(put, self.experience, experience), self.added + experience.reward.shape[0])

    def _advanced_count(self, steps: int) -> Int[Array, ""]:
        """Return `added` after `steps` more steps; multiples of the capacity are subtracted before it
        overflows 32 bits."""
        added, excess = self.added + steps, _FAR // 2 // self.capacity * self.capacity
        return jnp.where(added >= _FAR, added - excess, added)

    def sample(self, row: Int[Array, " environment"], key: Key[Array, ""], each: int) -> Experience:
        """Sample `each` transitions per environment uniformly with replacement; none leaves its device.

        Args:
            row: The global index of each environment, which seeds its random bits.

        Returns:
            Leaves of environment * each rows.
        """
        size = self.size
        slots = jax.vmap(lambda own: jax.random.randint(own, (each,), 0, size))(row_keys(key, row))

        def take(ring: jax.Array) -> jax.Array:
            transitions = jax.vmap(lambda own, chosen: own[chosen])(ring, slots)
            return transitions.reshape(-1, *ring.shape[2:])

        return jax.tree.map(take, self.experience)


def check_memory(replay: Replay, shardings: Any, free_bytes: int | None = None, *, runs: tuple[int, ...] = ()) -> None:
    """Check that a buffer alone fits in the memory of its devices.

    Args:
        replay: The abstract buffer of one run.
        shardings: The sharding of each leaf.
        free_bytes: Free memory of a device; None to query the device, or the system for a CPU.
        runs: Sizes of additional leading axes, for the buffers of several runs.

    Raises:
        RecipeError: The buffer does not fit; the message has both sizes, and the number of transitions that
            would fit.
    """
    leaves, each = jax.tree.leaves(replay.experience), jax.tree.leaves(shardings.experience)
    needed = sum(
        int(np.prod(sharding.shard_shape((*runs, *leaf.shape)))) * leaf.dtype.itemsize
        for leaf, sharding in zip(leaves, each)
    )
    free = _free_bytes(each[0]) if free_bytes is None else free_bytes
    if free is None or needed <= free:
        return
    environments, places = replay.experience.reward.shape
    count = math.prod(runs)
    of, lower = (f", in each of {count} runs side by side", "lower Seeds.count, ") if count > 1 else ("", "")
    total_bytes = sum(int(np.prod(leaf.shape)) * leaf.dtype.itemsize for leaf in leaves)
    fits = int(places * free / needed) * environments
    raise RecipeError(
        f"task.capacity={environments * places:,}{of}: the replay buffer takes {needed:,} bytes on each device "
        f"({total_bytes * count:,} in all, {total_bytes // (environments * places):,} for a transition), and there are "
        f"{free:,}; lower task.capacity to {fits:,} or fewer, {lower}or take more devices"
    )


def _free_bytes(sharding: Any) -> int | None:
    """Return the free memory of this process's first device, or None if it is unknown."""
    devices = sorted(sharding.addressable_devices, key=lambda device: device.id)
    if not devices:
        return None
    if devices[0].platform == "cpu":
        return free_bytes() // len(devices)
    stats = devices[0].memory_stats() or {}
    return stats.get("bytes_limit")


def to_batch(experience: Experience) -> Mapping[str, jax.Array]:
    """Convert transitions to the leaves of a batch."""
    return experience._asdict()
