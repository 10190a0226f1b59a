"""Distribution of whole-matrix work: each device owns some matrices, processes them, and returns the results
as shards.

Gathering every matrix on every device would send the bytes of a whole model to each and repeat all
computation on every device. Instead, the matrices of one shape are enumerated. Each device along the mesh
axes that hold their shards or replicas receives `ceil(matrices / owners)` whole matrices by one all-to-all,
processes them, and returns the shards by another all-to-all; devices that hold replicas then all-gather each
other's results. Matrices on other stages or experts are processed by those devices.

Per-matrix optimizer state travels the same way: between steps it is sharded over all devices, and its global
shape does not depend on the mesh.

Legend: `count` matrices per device stack, `owned` matrices per owner, `dims of a shard` local sizes, `whole
dims` global sizes.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp

from ...core.layout.declarations import tag_comm
from ...core.layout.layout import MeshAxes, current_layout
from ...mesh.rules import MESH_AXES
from ...spmd.collectives import all_gather
from ...spmd.sharding_marks import ValueState, assert_sharding
from ..matrix.orientation import TransposedView
from .shard import ParameterShard


class ShardPlacement(NamedTuple):
    """Layout of one matrix (or of its state), without the stacking dimensions.

    Attributes:
        sizes: Global size of each dimension.
        dim_axes: For each dimension, the mesh axes that shard it.
        shape: Shape seen by an owner: rows and columns, possibly merged from several dimensions.
    """

    sizes: tuple[int, ...]
    dim_axes: tuple[MeshAxes, ...]
    shape: tuple[int, ...]

    @property
    def split(self) -> MeshAxes:
        """The mesh axes that shard the matrix, in mesh order."""
        return tuple(axis for axis in MESH_AXES if any(axis in axes for axes in self.dim_axes))


class OwnedArray(NamedTuple):
    """A parameter, or the state of its matrices, that owners receive as whole matrices.

    Attributes:
        stack_dims: The dimensions merged into the stack of matrices.
        matrix_dims: The remaining dimensions, in the order in which an owner receives them.
        shape: Shape of one matrix on its owner.
    """

    shard: ParameterShard
    stack_dims: tuple[int, ...]
    matrix_dims: tuple[int, ...]
    shape: tuple[int, ...]

    @classmethod
    def of(cls, shard: ParameterShard) -> "OwnedArray":
        """Describe a parameter: rows before columns, with at most as many rows as columns.

        Raises:
            ValueError: The parameter is not a matrix.
        """
        oriented = TransposedView.of(shard.parameter)
        return cls(shard, oriented.stack_dims, (*oriented.rows, *oriented.columns), oriented.shape)

    @classmethod
    def of_statistic(cls, shard: ParameterShard) -> "OwnedArray":
        """Describe per-matrix state, with leading dimensions equal to the parameter's stack."""
        parameter = shard.parameter
        return cls(
            shard,
            parameter.stack_dims,
            parameter.array_dims,
            tuple(parameter.shape[dim] for dim in parameter.array_dims),
        )

    @property
    def placement(self) -> ShardPlacement:
        shape = self.shard.parameter.shape
        places = self.shard.dim_axes
        return ShardPlacement(
            tuple(shape[dim] for dim in self.matrix_dims), tuple(places[dim] for dim in self.matrix_dims), self.shape
        )

    @property
    def stack_axes(self) -> MeshAxes:
        """The mesh axes that shard the stack."""
        return self.shard.split_axes(self.stack_dims)

    def stack(self, x: jax.Array) -> jax.Array:
        """Merge the stacking dimensions of this device's shard into one leading dimension."""
        x = x.transpose((*self.stack_dims, *self.matrix_dims))
        return x.reshape(-1, *x.shape[len(self.stack_dims) :])

    def unstack(self, x: jax.Array) -> jax.Array:
        """Invert `stack`."""
        order, layout = (*self.stack_dims, *self.matrix_dims), current_layout()
        local = list(self.shard.parameter.shape)
        for dim, axes in enumerate(self.shard.dim_axes):
            local[dim] //= 1 if layout is None else math.prod(layout.sizes[axis] for axis in axes)
        return x.reshape([local[dim] for dim in order]).transpose([order.index(dim) for dim in range(len(order))])


class OwnedMatrices(NamedTuple):
    """A group of matrices with equal shapes and shardings, and the mesh axes over which their owners are
    spread.

    Attributes:
        inputs: Layouts of the inputs.
        outputs: Layouts of the results.
        owner_axes: All mesh axes of more than one device that hold shards or replicas of the matrices.
    """

    inputs: tuple[ShardPlacement, ...]
    outputs: tuple[ShardPlacement, ...]
    owner_axes: MeshAxes

    @classmethod
    def of(cls, inputs: Sequence[OwnedArray], returned: Sequence[OwnedArray]) -> "OwnedMatrices":
        """Group the inputs and results of one parameter.

        Raises:
            ValueError: The stacks of the inputs and results are sharded over different mesh axes.
        """
        layout, apart = current_layout(), {part.stack_axes for part in (*inputs, *returned)}
        if len(apart) > 1:
            names = [part.shard.parameter.name for part in (*inputs, *returned)]
            raise ValueError(f"the stacks of {names} are split over {sorted(apart)}; expected the same mesh axes")
        over = ()
        if layout is not None:
            over = tuple(axis for axis in MESH_AXES if layout.sizes[axis] > 1 and axis not in (*apart,)[0])
        return cls(tuple(part.placement for part in inputs), tuple(part.placement for part in returned), over)

    def num_owned(self, matrices: int, sizes: Mapping[str, int]) -> int:
        """Return how many of `matrices` each owner processes, padding included.

        >>> OwnedMatrices((), (), ("replica", "fsdp")).num_owned(12, {"replica": 2, "fsdp": 4})
        2
        """
        return -(-matrices // math.prod(sizes[axis] for axis in self.owner_axes))


Arrays = Mapping[str, Sequence[jax.Array]]
ArraysToOwn = Mapping[str, Sequence[OwnedArray]]
MatrixFunction = Callable[..., Sequence[jax.Array]]
"""Takes arrays of (matrices, *shape), one per input; returns one per result."""


def map_to_owners(
    work: MatrixFunction, owned_inputs: ArraysToOwn, arrays: Arrays, returned: ArraysToOwn
) -> dict[str, list[jax.Array]]:
    """Run `work` on every matrix of the given parameters, each matrix on one device.

    Args:
        owned_inputs: Parameter name to the inputs of `work`.
        arrays: Parameter name to this device's shards of those inputs.
        returned: Parameter name to the results of `work`.

    Returns:
        Parameter name to this device's shards of the results.
    """
    # Matrices with equal shapes and shardings are concatenated, so each group costs one pair of all-to-alls.
    groups: dict[OwnedMatrices, list[str]] = {}
    for name in owned_inputs:
        groups.setdefault(OwnedMatrices.of(owned_inputs[name], returned[name]), []).append(name)
    returned_shards: dict[str, list[jax.Array]] = {}
    for group, names in groups.items():
        stacks = {name: [part.stack(x) for part, x in zip(owned_inputs[name], arrays[name])] for name in names}
        results = _worked(work, group, [jnp.concatenate(one) for one in zip(*stacks.values())])
        begin = 0
        for name, (first, *_) in stacks.items():
            end = begin + len(first)
            returned_shards[name] = [part.unstack(x[begin:end]) for part, x in zip(returned[name], results)]
            begin = end
    return returned_shards


def map_one_by_one(work: MatrixFunction) -> MatrixFunction:
    """Run `work` on one matrix at a time, with `jax.lax.map`.

    Intermediates take the memory of a single matrix, and rounding does not depend on how many matrices a
    device owns.

    Args:
        work: Takes and returns arrays of (1, *shape).
    """

    def each(stacks: Sequence[jax.Array]) -> list[jax.Array]:
        return [x[0] for x in work(*(x[None] for x in stacks))]

    return lambda *stacks: jax.lax.map(each, stacks)


def _worked(work: MatrixFunction, group: OwnedMatrices, stacks: Sequence[jax.Array]) -> list[jax.Array]:
    layout = current_layout()
    if layout is None or not group.owner_axes:
        matrices = [x.reshape(len(x), *placement.shape) for placement, x in zip(group.inputs, stacks)]
        return [x.reshape(len(x), *placement.sizes) for placement, x in zip(group.outputs, work(*matrices))]
    count, sizes = len(stacks[0]), layout.sizes
    owned = group.num_owned(count, sizes)
    matrices = [
        _to_owners(placement, group.owner_axes, stack, owned, sizes) for placement, stack in zip(group.inputs, stacks)
    ]
    # From here on, each device holds different matrices.
    done = work(*assert_sharding(matrices, dict.fromkeys(group.owner_axes, ValueState.SPLIT)))
    return [_from_owners(placement, group.owner_axes, x, sizes)[:count] for placement, x in zip(group.outputs, done)]


def _to_owners(
    placement: ShardPlacement, over: MeshAxes, stack: jax.Array, owned: int, sizes: Mapping[str, int]
) -> jax.Array:
    """Send shards to owners: (count, dims of a shard) of all matrices to (owned, whole dims) of this device's
    matrices.

    The devices along the mesh axes `over`, in mesh order, own consecutive runs of matrices.
    """
    local = stack.shape[1:]
    ways = [sizes[axis] for axis in over]
    filled = jnp.pad(stack, ((0, owned * math.prod(ways) - len(stack)), *((0, 0) for _ in local)))
    split, copied = placement.split, tuple(axis for axis in over if axis not in placement.split)
    # Devices with equal shards (replicas) each send different matrices: those for owners with the same replica index.
    # (owner index per axis of `over`..., owned, *local) -> (replicas, shards, owned, *local).
    parts = filled.reshape(*ways, owned, *local)
    first = [over.index(axis) for axis in (*copied, *split)]
    parts = parts.transpose(*first, *range(len(over), parts.ndim))
    parts = parts.reshape(math.prod(sizes[axis] for axis in copied), -1, owned, *local)
    mine = jax.lax.axis_index(copied) if copied else 0
    parts = jax.lax.dynamic_index_in_dim(parts, mine, keepdims=False)
    if not split:
        return parts[0].reshape(owned, *placement.shape)
    with tag_comm("optimizer"):
        parts = jax.lax.all_to_all(parts, split, 0, 0)
    # Dimension 0 now indexes the shards of this device's matrices; interleave it with the local dimensions.
    parts = parts.reshape(*(sizes[axis] for axis in split), owned, *local)
    return parts.transpose(_interleaved(placement)).reshape(owned, *placement.shape)


def _from_owners(placement: ShardPlacement, over: MeshAxes, matrices: jax.Array, sizes: Mapping[str, int]) -> jax.Array:
    """Invert `_to_owners`: (owned, whole dims) to (owners x owned, dims of a shard)."""
    owned, split = len(matrices), placement.split
    copied = tuple(axis for axis in over if axis not in split)
    cut: list[int] = []
    local: list[int] = []
    for size, axes in zip(placement.sizes, placement.dim_axes):
        ways = [sizes[axis] for axis in axes]
        local.append(size // math.prod(ways))
        cut += [*ways, local[-1]]
    # Split each whole dimension into (mesh axes..., local size), and bring the mesh axes to the front.
    order = _interleaved(placement)
    parts = matrices.reshape(owned, *cut).transpose([order.index(dim) for dim in range(len(order))])
    parts = parts.reshape(-1, owned, *local)
    if split:
        with tag_comm("optimizer"):
            parts = jax.lax.all_to_all(parts, split, 0, 0)
    for dim, axes in enumerate(placement.dim_axes):
        parts = assert_sharding(parts, dict.fromkeys(axes, ValueState.SPLIT), 2 + dim)
    if copied:
        with tag_comm("optimizer"):
            parts = all_gather(assert_sharding(parts[None], dict.fromkeys(copied, ValueState.SPLIT)), copied, 0)
    parts = parts.reshape(*(sizes[axis] for axis in (*copied, *split)), owned, *local)
    # Restore the mesh order of the owners, in which `_to_owners` enumerated the matrices.
    owner_order = [(*copied, *split).index(axis) for axis in over]
    return parts.transpose(*owner_order, *range(len(over), parts.ndim)).reshape(-1, *local)


def _interleaved(placement: ShardPlacement) -> list[int]:
    """Return the permutation of (each splitting mesh axis, owned, each dimension) to (owned, then each
    dimension preceded by its mesh axes)."""
    split = placement.split
    order = [len(split)]
    for dim, places in enumerate(placement.dim_axes):
        order += [*(split.index(axis) for axis in places), len(split) + 1 + dim]
    return order
