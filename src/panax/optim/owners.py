"""Work that takes whole matrices, shared out: each device owns some of them, computes, and hands the results back.

Gathering every matrix to every device would send a whole model's bytes to each, and compute everything as often as there are
devices. Here the matrices of one shape are numbered, each device of the axes that hold copies or shards of them gets the whole of
`ceil(matrices / owners)` by one all-to-all, works on these, and one all-to-all brings the shards back; devices that hold copies
gather each other's results then. Matrices that lie on other stages or experts are those devices' own affair.
"""

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp

from ..core.expected import moving
from ..core.layout import MeshAxes, current_layout
from ..mesh.rules import MESH_AXES
from ..spmd.collectives import all_gather
from ..spmd.marks import Holds, declared
from .parameter import Parameter
from .shard import Shard


class Oriented(NamedTuple):
    """A parameter as a stack of matrices with no more rows than columns.

    Attributes:
        copies: The dimensions that are put together to the stack.
        rows: The dimensions that are put together to the rows, in the parameter's order.
        flipped: The parameter's own rows are the columns here.
    """

    copies: tuple[int, ...]
    rows: tuple[int, ...]
    columns: tuple[int, ...]
    flipped: bool

    @classmethod
    def of(cls, parameter: Parameter) -> "Oriented":
        """
        Raises:
            ValueError: It is not a matrix.
        """
        if parameter.matrix is None:
            raise ValueError(f"{parameter.name} with the axes {parameter.axes} is not a matrix")

        def sizes(dims: Sequence[int]) -> tuple[int, ...]:
            return tuple(parameter.shape[dim] for dim in dims)

        rows, columns = parameter.matrix
        # Of a square one, too, so that matrices of equal shape and layout come to one group whichever way they map.
        flips = (math.prod(sizes(columns)), sizes(columns)) < (math.prod(sizes(rows)), sizes(rows))
        if flips:
            rows, columns = columns, rows
        return cls(parameter.copies, rows, columns, flips)

    @property
    def order(self) -> tuple[int, ...]:
        return (*self.copies, *self.rows, *self.columns)


@dataclasses.dataclass(frozen=True)
class Group:
    """Matrices of one shape that lie alike, and who owns which of them.

    Attributes:
        rows: The sizes of the dimensions that make up a row's index; `columns` the same.
        places: For each of these dimensions, rows first, the mesh axes that it is split over.
        over: The mesh axes whose devices own the matrices: all that hold shards or copies of them.
    """

    rows: tuple[int, ...]
    columns: tuple[int, ...]
    places: tuple[MeshAxes, ...]
    over: MeshAxes

    @classmethod
    def of(cls, shard: Shard) -> "Group":
        layout, oriented, shape = current_layout(), Oriented.of(shard.parameter), shard.parameter.shape
        apart = set(shard.over(oriented.copies))
        over = () if layout is None else tuple(a for a in MESH_AXES if layout.sizes[a] > 1 and a not in apart)
        return cls(
            tuple(shape[dim] for dim in oriented.rows),
            tuple(shape[dim] for dim in oriented.columns),
            tuple(shard.places[dim] for dim in (*oriented.rows, *oriented.columns)),
            over,
        )

    @property
    def shape(self) -> tuple[int, int]:
        """Of one matrix."""
        return math.prod(self.rows), math.prod(self.columns)

    @property
    def split(self) -> MeshAxes:
        """The mesh axes that hold shards of a matrix."""
        return tuple(axis for axes in self.places for axis in axes)

    @property
    def copied(self) -> MeshAxes:
        """Those that hold copies."""
        return tuple(axis for axis in self.over if axis not in self.split)

    def owned(self, matrices: int, sizes: Mapping[str, int]) -> int:
        """How many of so many matrices each owner works on, those included that fill up.

        >>> Group((64,), (256,), (("fsdp",), ()), ("replica", "fsdp")).owned(12, {"replica": 2, "fsdp": 4})
        2
        """
        return -(-matrices // math.prod(sizes[axis] for axis in self.over))


Work = Callable[[jax.Array], jax.Array]
"""Takes whole matrices (matrices, rows, columns), returns as many of the same shape."""


def shared_out(work: Work, shards: Mapping[str, Shard], arrays: Mapping[str, jax.Array]) -> dict[str, jax.Array]:
    """`work` on each own matrix of some parameters, each of them done by one device.

    Args:
        arrays: Parameter name to this device's shard of what `work` takes.

    Returns:
        The results' shards, by the same names.
    """
    groups: dict[Group, list[str]] = {}
    for name in arrays:
        groups.setdefault(Group.of(shards[name]), []).append(name)
    found: dict[str, jax.Array] = {}
    for group, names in groups.items():
        stacks = [_stacked(shards[name].parameter, arrays[name]) for name in names]
        results = _worked(work, group, jnp.concatenate(stacks))
        begin = 0
        for name, stack in zip(names, stacks):
            result = results[begin : begin + len(stack)]
            found[name] = _unstacked(shards[name].parameter, result, arrays[name].shape)
            begin += len(stack)
    return found


def _stacked(parameter: Parameter, x: jax.Array) -> jax.Array:
    """A shard with its matrices in one dimension, rows before columns."""
    oriented = Oriented.of(parameter)
    x = x.transpose(oriented.order)
    return x.reshape(-1, *x.shape[len(oriented.copies) :])


def _unstacked(parameter: Parameter, x: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    order = Oriented.of(parameter).order
    return x.reshape([shape[dim] for dim in order]).transpose([order.index(dim) for dim in range(len(order))])


def _worked(work: Work, group: Group, stack: jax.Array) -> jax.Array:
    layout = current_layout()
    if layout is None or not group.over:
        return work(stack.reshape(len(stack), *group.shape)).reshape(stack.shape)
    count, sizes, local = len(stack), layout.sizes, stack.shape[1:]
    owned = group.owned(count, sizes)
    shards = math.prod(sizes[axis] for axis in group.split)
    owners = math.prod(sizes[axis] for axis in group.over)
    filled = jnp.pad(stack, ((0, owned * owners - count), *((0, 0) for _ in local)))
    if group.copied:
        # Devices that hold the same shards begin with different matrices of them.
        first = jax.lax.axis_index(group.copied) * (shards * owned)
        filled = jax.lax.dynamic_slice_in_dim(filled, first, shards * owned)
    whole = _to_owners(group, filled.reshape(shards, owned, *local), sizes)
    # Every device has matrices of its own now.
    done = work(declared(whole.reshape(owned, *group.shape), dict.fromkeys(group.over, Holds.SPLIT)))
    back = _from_owners(group, done.reshape(whole.shape), sizes).reshape(shards * owned, *local)
    for dim, axes in enumerate(group.places):
        back = declared(back, dict.fromkeys(axes, Holds.SPLIT), 1 + dim)
    if group.copied:
        with moving("optimizer"):
            back = all_gather(declared(back, dict.fromkeys(group.copied, Holds.SPLIT)), group.copied, 0)
    return back[:count]


def _to_owners(group: Group, parts: jax.Array, sizes: Mapping[str, int]) -> jax.Array:
    """(shards, owned, dims of a shard) of this device's shards, to (owned, whole dims) of its own matrices."""
    if not group.split:
        return parts[0]
    with moving("optimizer"):
        parts = jax.lax.all_to_all(parts, group.split, 0, 0)
    _, owned, *local = parts.shape
    parts = parts.reshape(*(sizes[axis] for axis in group.split), owned, *local)
    order, dims = _interleaved(group)
    whole = [size * math.prod(sizes[axis] for axis in axes) for size, axes in zip(local, group.places)]
    return parts.transpose([dims, *order]).reshape(owned, *whole)


def _from_owners(group: Group, whole: jax.Array, sizes: Mapping[str, int]) -> jax.Array:
    """The way back."""
    if not group.split:
        return whole[None]
    owned = len(whole)
    cut: list[int] = []
    for size, axes in zip(whole.shape[1:], group.places):
        ways = [sizes[axis] for axis in axes]
        cut += [*ways, size // math.prod(ways)]
    order, dims = _interleaved(group)
    parts = whole.reshape(owned, *cut)
    # Where each dimension of the parts lies in what was just cut.
    places = [dims, *order]
    parts = parts.transpose([places.index(dim) for dim in range(len(places))])
    shards = math.prod(parts.shape[:dims])
    with moving("optimizer"):
        return jax.lax.all_to_all(parts.reshape(shards, owned, *parts.shape[dims + 1 :]), group.split, 0, 0)


def _interleaved(group: Group) -> tuple[list[int], int]:
    """Of (each mesh axis that splits, owned, each dimension): the order in which a dimension's mesh axes come right before it,
    and the place of `owned`."""
    axes = len(group.split)
    order: list[int] = []
    seen = 0
    for dim, places in enumerate(group.places):
        order += [*range(seen, seen + len(places)), axes + 1 + dim]
        seen += len(places)
    return order, axes
