"""Replay of a step on the same devices in another order, with checksums of the result, to find devices that
compute incorrectly.

On a mesh with its devices rolled, every logical shard is on another device, and the program is otherwise the
same. The results are therefore bitwise equal unless a device errs. The state and the batch move from device
to device unchanged: each replica of a value moves from its own device, and nothing passes through the host.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from ..core import TrainState
from ..mesh import Placement
from .compiled_step import CompiledStep
from .update import Scalars

Signature = tuple[Any, ...]


class RolledReplay:
    """A step that does not donate its state, on another step's mesh with the devices rolled.

    Attributes:
        places: The shift: logical shard i is on the device that normally holds shard i + `places`.
        step: The step compiled for the rolled mesh.
    """

    def __init__(self, step: CompiledStep, places: int, sums: "ShardSums"):
        """Compile the rolled step.

        Args:
            step: The usual step, on more than one device.
            places: From 0, the usual order, to the number of devices less 1.
            sums: Checksums for the usual mesh.
        """
        self.places = places
        self._shard_sums = sums
        self._usual = step.placement.devices
        self.step = CompiledStep(
            step.program,
            roll_placement(step.placement, places),
            step.batch_axes,
            shapes_allowed=step.shapes_allowed,
            donates=False,
        )
        self._moves: dict[Signature, Callable[[list[jax.Array]], list[jax.Array]]] = {}

    @property
    def mesh(self) -> Mesh:
        return self.step.placement.devices

    def replay_step(
        self, state: TrainState, batch: Mapping[str, jax.Array]
    ) -> tuple[TrainState, Mapping[str, Any], np.ndarray]:
        """Take a step on the rolled mesh from a state and a batch on the usual mesh.

        Returns:
            The new state and the scalars, on the rolled mesh, and the checksums of each of their logical
            shards, as in `ShardSums`.
        """
        result = self.step(*self.roll((state, dict(batch)))) if self.places else self.step(state, batch)
        # One program computes all checksums, with devices in their usual order.
        leaves = [relabel_devices(leaf, self._usual) for leaf in jax.tree.leaves(result)]
        return *result, np.roll(self._shard_sums(leaves), -self.places, axis=0)

    def extra_bytes(self, batch: Mapping[str, Any]) -> int | None:
        """Return the additional memory that each device needs compared with a usual step; None if XLA does
        not report it.

        It is the size of the moved state and batch, and of the resulting state.
        """
        memory = self.step.get_compiled(batch).memory_analysis()
        return None if memory is None else int(memory.argument_size_in_bytes + memory.output_size_in_bytes)

    def roll(self, tree: Any) -> Any:
        """Move a tree from the usual mesh to this one: the same logical arrays, with every device's copies
        moved unchanged."""
        leaves, structure = jax.tree.flatten(tree)
        signature = _signature(leaves)
        if signature not in self._moves:
            size = self._usual.size
            pairs = [(i, (i + self.places) % size) for i in range(size)]
            names = self._usual.axis_names
            self._moves[signature] = _on_shards(
                self._usual, leaves, partial(_permuted, axes=names, pairs=pairs), returns_leaves=True
            )
        moved = self._moves[signature](leaves)
        return structure.unflatten([relabel_devices(leaf, self.mesh, like) for leaf, like in zip(moved, leaves)])


class ShardSums:
    """Checksums of the arrays on each device of a mesh; two per leaf of a list, equal for equal bits.

    Each value's raw bits, as 32-bit words w at positions p of the shard, are mixed to h(w, p), which is
    injective in w at each position. One checksum is the sum of h modulo 2^32, the other the exclusive or of
    another such h. A change in a single word, even the lowest bit, the sign of a zero or the payload of a
    NaN, is therefore certain to change both. Changes in several words would have to cancel in both. Equal
    flips in two words do not, since the mixing is nonlinear; nor do swapped values, since the position is
    mixed in. A collision has a chance of 1 in 2^64.
    """

    def __init__(self, mesh: Mesh):
        self._mesh = mesh
        self._programs: dict[Signature, Callable[[list[jax.Array]], jax.Array]] = {}

    def __call__(self, leaves: Sequence[jax.Array]) -> np.ndarray:
        """Compute uint32 checksums of shape (device, leaf, 2), in every process, with devices in mesh
        order."""
        signature = _signature(leaves)
        if signature not in self._programs:
            summed = partial(_summed, axes=self._mesh.axis_names)
            self._programs[signature] = _on_shards(self._mesh, leaves, summed, returns_leaves=False)
        return np.asarray(self._programs[signature](list(leaves)).addressable_data(0))


def relabel_devices(leaf: jax.Array, mesh: Mesh, like: jax.Array | None = None) -> jax.Array:
    """Reinterpret an array on the same devices in another order: each keeps its data, which becomes another
    logical shard.

    Args:
        like: Array with the result's dtype; if that is a PRNG key, `leaf` may hold its raw data.
    """
    like = leaf if like is None else like
    sharding = NamedSharding(mesh, _spec(like))
    data = jax.random.key_data(leaf) if _is_key(leaf) else leaf
    shards = [shard.data for shard in data.addressable_shards]
    moved = jax.make_array_from_single_device_arrays(data.shape, sharding, shards)
    if not _is_key(like):
        return moved
    kind = jax.random.key_impl(like)
    return jax.jit(lambda data: jax.random.wrap_key_data(data, impl=kind), out_shardings=sharding)(moved)


def roll_placement(placement: Placement, places: int) -> Placement:
    """Return the placement with its devices rolled: logical shard i gets the device of shard i + `places`."""
    grid = placement.devices.devices
    turned = np.roll(grid.reshape(-1), -places).reshape(grid.shape)
    mesh = Mesh(turned, placement.devices.axis_names, axis_types=placement.devices.axis_types)
    return Placement(mesh, placement.rules, placement.row_order)


def leaf_names(state: TrainState, scalars: Scalars) -> list[str]:
    """Return the names of the leaves that `RolledReplay.replay_step` sums, in order."""
    return [
        jax.tree_util.keystr(path, simple=True, separator=".")
        for tree in (state, {"scalars": scalars})
        for path, _ in jax.tree_util.tree_flatten_with_path(tree)[0]
    ]


def _on_shards(mesh: Mesh, leaves: Sequence[jax.Array], function: Any, *, returns_leaves: bool) -> Any:
    """Jit a function of these leaves as each device holds them; PRNG keys are passed as raw data."""
    specs = [_spec(leaf) for leaf in leaves]
    on_shards = jax.shard_map(
        function, mesh=mesh, in_specs=(specs,), out_specs=specs if returns_leaves else PartitionSpec(), check_vma=False
    )

    def of_leaves(leaves: list[jax.Array]) -> Any:
        return on_shards([jax.random.key_data(leaf) if _is_key(leaf) else leaf for leaf in leaves])

    return jax.jit(of_leaves)


def _permuted(leaves: list[jax.Array], *, axes: Sequence[str], pairs: Sequence[tuple[int, int]]) -> list[jax.Array]:
    def move(leaf: jax.Array) -> jax.Array:
        # Send raw bits, since a collective might change a NaN's payload.
        bits = _bits(leaf)
        sent = lax.ppermute(bits, tuple(axes), list(pairs))
        return sent.astype(leaf.dtype) if _is_cast(leaf) else lax.bitcast_convert_type(sent, leaf.dtype)

    return [_by_parts(move, leaf) for leaf in leaves]


def _by_parts(move: Callable[[jax.Array], jax.Array], leaf: jax.Array) -> jax.Array:
    if not jnp.issubdtype(leaf.dtype, jnp.complexfloating):
        return move(leaf)
    return lax.complex(move(lax.real(leaf)), move(lax.imag(leaf)))


def _summed(leaves: list[jax.Array], *, axes: Sequence[str]) -> jax.Array:
    return lax.all_gather(jnp.stack([_checksums(leaf) for leaf in leaves]), tuple(axes))


def _checksums(leaf: jax.Array) -> jax.Array:
    words = _words(leaf)
    positions = lax.iota(jnp.uint32, words.size)
    first = _mixed(words ^ _mixed(positions + jnp.uint32(0x9E3779B9)))
    second = _mixed(words + _mixed(positions ^ jnp.uint32(0x7F4A7C15)))
    total = jnp.sum(first, dtype=jnp.uint32)
    return jnp.stack([total, lax.reduce(second, jnp.uint32(0), lax.bitwise_xor, (0,))])


def _mixed(word: jax.Array) -> jax.Array:
    """Mix a word so that each bit changes about half of the others, injectively.

    Source: the finalizer of MurmurHash3 (Appleby, public domain).
    """
    word = (word ^ (word >> jnp.uint32(16))) * jnp.uint32(0x85EBCA6B)
    word = (word ^ (word >> jnp.uint32(13))) * jnp.uint32(0xC2B2AE35)
    return word ^ (word >> jnp.uint32(16))


def _words(leaf: jax.Array) -> jax.Array:
    if jnp.issubdtype(leaf.dtype, jnp.complexfloating):
        return jnp.concatenate([_words(lax.real(leaf)), _words(lax.imag(leaf))])
    bits = _bits(leaf).reshape(-1)
    if bits.dtype.itemsize == 8:
        return lax.bitcast_convert_type(bits, jnp.uint32).reshape(-1)
    return bits.astype(jnp.uint32)


def _bits(leaf: jax.Array) -> jax.Array:
    if _is_cast(leaf):
        return leaf.astype(jnp.uint8)
    return lax.bitcast_convert_type(leaf, jnp.dtype(f"uint{8 * leaf.dtype.itemsize}"))


def _is_cast(leaf: jax.Array) -> bool:
    """Return True if the dtype cannot be bit-cast to whole bytes: bools, and integers of 4 bits or fewer."""
    return leaf.dtype == jnp.bool_ or (jnp.issubdtype(leaf.dtype, jnp.integer) and jnp.iinfo(leaf.dtype).bits < 8)


def _is_key(leaf: Any) -> bool:
    return jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def _spec(leaf: jax.Array) -> PartitionSpec:
    assert isinstance(leaf.sharding, NamedSharding), leaf.sharding
    return leaf.sharding.spec


def _signature(leaves: Sequence[jax.Array]) -> Signature:
    return tuple((leaf.shape, str(leaf.dtype), _spec(leaf)) for leaf in leaves)
