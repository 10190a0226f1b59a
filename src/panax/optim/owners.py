"""Work that takes whole matrices, shared out: each device owns some of them, computes, and hands the results back.

Gathering every matrix to every device would send a whole model's bytes to each, and compute everything as often as there are
devices. Here the matrices of one shape are numbered, each device of the axes that hold copies or shards of them gets the whole of
`ceil(matrices / owners)` by one all-to-all, works on these, and one all-to-all brings the shards back; devices that hold copies
gather each other's results then. Matrices that lie on other stages or experts are those devices' own affair.

What an optimizer keeps of a matrix goes the same way: it rests split over all devices, in a shape that no mesh changes.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp

from ..core.expected import tag_comm
from ..core.layout import MeshAxes, current_layout
from ..mesh.rules import MESH_AXES
from ..spmd.collectives import all_gather
from ..spmd.marks import ValueState, assert_sharding
from .oriented import TransposedView
from .shard import ParameterShard


class Lying(NamedTuple):
    """How what belongs to a matrix lies, without the dimensions of the stack.

    Attributes:
        sizes: Whole.
        places: Of each dimension, the mesh axes that it is split over.
        shape: That an owner sees: rows and columns, each put together of several dimensions.
    """

    sizes: tuple[int, ...]
    places: tuple[MeshAxes, ...]
    shape: tuple[int, ...]

    @property
    def split(self) -> MeshAxes:
        """The mesh axes that hold shards, in the mesh's order."""
        return tuple(axis for axis in MESH_AXES if any(axis in axes for axes in self.places))


class OwnedArray(NamedTuple):
    """An array of a parameter's shape, or of what is kept of its matrices, as one that owners see whole.

    Attributes:
        copies: The dimensions that are put together to the stack of matrices.
        own: The others, in the order in which they go to an owner.
        shape: That an owner sees.
    """

    shard: ParameterShard
    copies: tuple[int, ...]
    own: tuple[int, ...]
    shape: tuple[int, ...]

    @classmethod
    def of(cls, shard: ParameterShard) -> "OwnedArray":
        """Of a parameter: rows before columns, with no more rows than columns.

        Raises:
            ValueError: It is not a matrix.
        """
        oriented = TransposedView.of(shard.parameter)
        return cls(shard, oriented.copies, (*oriented.rows, *oriented.columns), oriented.shape)

    @classmethod
    def beside(cls, shard: ParameterShard) -> "OwnedArray":
        """Of what is kept for each matrix of a parameter, which begins with that parameter's stack."""
        parameter = shard.parameter
        return cls(shard, parameter.copies, parameter.own, tuple(parameter.shape[dim] for dim in parameter.own))

    @property
    def lying(self) -> Lying:
        shape = self.shard.parameter.shape
        places = self.shard.places
        return Lying(tuple(shape[dim] for dim in self.own), tuple(places[dim] for dim in self.own), self.shape)

    @property
    def apart(self) -> MeshAxes:
        """The mesh axes that the stack is split over."""
        return self.shard.over(self.copies)

    def stacked(self, x: jax.Array) -> jax.Array:
        """This device's shard with its matrices in one dimension."""
        x = x.transpose((*self.copies, *self.own))
        return x.reshape(-1, *x.shape[len(self.copies) :])

    def unstacked(self, x: jax.Array) -> jax.Array:
        """The way back."""
        order, layout = (*self.copies, *self.own), current_layout()
        local = list(self.shard.parameter.shape)
        for dim, axes in enumerate(self.shard.places):
            local[dim] //= 1 if layout is None else math.prod(layout.sizes[axis] for axis in axes)
        return x.reshape([local[dim] for dim in order]).transpose([order.index(dim) for dim in range(len(order))])


class OwnedMatrices(NamedTuple):
    """Matrices whose arrays are alike and lie alike, and the mesh axes whose devices own them: all that hold shards or copies.

    Attributes:
        given: How what the work takes lies; `returned` the same of what it gives.
    """

    given: tuple[Lying, ...]
    returned: tuple[Lying, ...]
    over: MeshAxes

    @classmethod
    def of(cls, given: Sequence[OwnedArray], returned: Sequence[OwnedArray]) -> "OwnedMatrices":
        """
        Raises:
            ValueError: Parts of one matrix are split over different devices.
        """
        layout, apart = current_layout(), {part.apart for part in (*given, *returned)}
        if len(apart) > 1:
            names = [part.shard.parameter.name for part in (*given, *returned)]
            raise ValueError(f"the stacks of {names} are split over {sorted(apart)}; expected the same mesh axes")
        over = ()
        if layout is not None:
            over = tuple(axis for axis in MESH_AXES if layout.sizes[axis] > 1 and axis not in (*apart,)[0])
        return cls(tuple(part.lying for part in given), tuple(part.lying for part in returned), over)

    def owned(self, matrices: int, sizes: Mapping[str, int]) -> int:
        """How many of so many matrices each owner works on, those included that fill up.

        >>> OwnedMatrices((), (), ("replica", "fsdp")).owned(12, {"replica": 2, "fsdp": 4})
        2
        """
        return -(-matrices // math.prod(sizes[axis] for axis in self.over))


Arrays = Mapping[str, Sequence[jax.Array]]
Parts = Mapping[str, Sequence[OwnedArray]]
Work = Callable[..., Sequence[jax.Array]]
"""Takes arrays of (matrices, *shape), one for each part that is given; returns one for each that is returned."""


def map_to_owners(work: Work, given: Parts, arrays: Arrays, returned: Parts) -> dict[str, list[jax.Array]]:
    """`work` on each own matrix of some parameters, each of them done by one device.

    Args:
        given: Parameter name to what `work` takes of it; `arrays`: this device's shards of that.

    Returns:
        The shards of what `returned` describes, by the same names.
    """
    groups: dict[OwnedMatrices, list[str]] = {}
    for name in given:
        groups.setdefault(OwnedMatrices.of(given[name], returned[name]), []).append(name)
    found: dict[str, list[jax.Array]] = {}
    for group, names in groups.items():
        stacks = {name: [part.stacked(x) for part, x in zip(given[name], arrays[name])] for name in names}
        results = _worked(work, group, [jnp.concatenate(one) for one in zip(*stacks.values())])
        begin = 0
        for name, (first, *_) in stacks.items():
            end = begin + len(first)
            found[name] = [part.unstacked(x[begin:end]) for part, x in zip(returned[name], results)]
            begin = end
    return found


def one_by_one(work: Work) -> Work:
    """`work` on each matrix by itself, one after the other: what it needs for its intermediate results is that of one matrix,
    and its roundings do not depend on how many a device owns.

    Args:
        work: Takes and returns arrays of (1, *shape).
    """

    def each(stacks: Sequence[jax.Array]) -> list[jax.Array]:
        return [x[0] for x in work(*(x[None] for x in stacks))]

    return lambda *stacks: jax.lax.map(each, stacks)


def _worked(work: Work, group: OwnedMatrices, stacks: Sequence[jax.Array]) -> list[jax.Array]:
    layout = current_layout()
    if layout is None or not group.over:
        whole = [x.reshape(len(x), *lying.shape) for lying, x in zip(group.given, stacks)]
        return [x.reshape(len(x), *lying.sizes) for lying, x in zip(group.returned, work(*whole))]
    count, sizes = len(stacks[0]), layout.sizes
    owned = group.owned(count, sizes)
    whole = [_to_owners(lying, group.over, stack, owned, sizes) for lying, stack in zip(group.given, stacks)]
    # Every device has matrices of its own now.
    done = work(*assert_sharding(whole, dict.fromkeys(group.over, ValueState.SPLIT)))
    return [_from_owners(lying, group.over, x, sizes)[:count] for lying, x in zip(group.returned, done)]


def _to_owners(lying: Lying, over: MeshAxes, stack: jax.Array, owned: int, sizes: Mapping[str, int]) -> jax.Array:
    """(count, dims of a shard) of all matrices, to (owned, whole dims) of this device's own.

    The devices of the mesh axes `over`, in the mesh's order, own one run of matrices after the other.
    """
    local = stack.shape[1:]
    ways = [sizes[axis] for axis in over]
    filled = jnp.pad(stack, ((0, owned * math.prod(ways) - len(stack)), *((0, 0) for _ in local)))
    split, copied = lying.split, tuple(axis for axis in over if axis not in lying.split)
    # Devices that hold the same shards send different matrices of them: those for the owners among which they are.
    parts = filled.reshape(*ways, owned, *local)
    first = [over.index(axis) for axis in (*copied, *split)]
    parts = parts.transpose(*first, *range(len(over), parts.ndim))
    parts = parts.reshape(math.prod(sizes[axis] for axis in copied), -1, owned, *local)
    mine = jax.lax.axis_index(copied) if copied else 0
    parts = jax.lax.dynamic_index_in_dim(parts, mine, keepdims=False)
    if not split:
        return parts[0].reshape(owned, *lying.shape)
    with tag_comm("optimizer"):
        parts = jax.lax.all_to_all(parts, split, 0, 0)
    parts = parts.reshape(*(sizes[axis] for axis in split), owned, *local)
    return parts.transpose(_interleaved(lying)).reshape(owned, *lying.shape)


def _from_owners(lying: Lying, over: MeshAxes, whole: jax.Array, sizes: Mapping[str, int]) -> jax.Array:
    """The way back: (owned, whole dims) to (owners x owned, dims of a shard)."""
    owned, split = len(whole), lying.split
    copied = tuple(axis for axis in over if axis not in split)
    cut: list[int] = []
    local: list[int] = []
    for size, axes in zip(lying.sizes, lying.places):
        ways = [sizes[axis] for axis in axes]
        local.append(size // math.prod(ways))
        cut += [*ways, local[-1]]
    order = _interleaved(lying)
    parts = whole.reshape(owned, *cut).transpose([order.index(dim) for dim in range(len(order))])
    parts = parts.reshape(-1, owned, *local)
    if split:
        with tag_comm("optimizer"):
            parts = jax.lax.all_to_all(parts, split, 0, 0)
    for dim, axes in enumerate(lying.places):
        parts = assert_sharding(parts, dict.fromkeys(axes, ValueState.SPLIT), 2 + dim)
    if copied:
        with tag_comm("optimizer"):
            parts = all_gather(assert_sharding(parts[None], dict.fromkeys(copied, ValueState.SPLIT)), copied, 0)
    parts = parts.reshape(*(sizes[axis] for axis in (*copied, *split)), owned, *local)
    found = [(*copied, *split).index(axis) for axis in over]
    return parts.transpose(*found, *range(len(over), parts.ndim)).reshape(-1, *local)


def _interleaved(lying: Lying) -> list[int]:
    """Of (each mesh axis that splits, owned, each dimension): `owned`, then each dimension with its mesh axes right before it."""
    split = lying.split
    order = [len(split)]
    for dim, places in enumerate(lying.places):
        order += [*(split.index(axis) for axis in places), len(split) + 1 + dim]
    return order
