"""What an optimizer asks of the other devices while it works on its own shard of a parameter."""

import dataclasses
import math
from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from ..core.counter_hash import bits_of_places
from ..core.expected import tag_comm
from ..core.layout import MeshAxes, current_layout
from ..core.protocols import Axes
from ..kernels.precision import accumulation_dtype
from ..mesh.placement import as_spec
from ..spmd.collectives import all_reduce
from ..spmd.manual import map_over_shards
from .parameter import Parameter


@dataclasses.dataclass(frozen=True)
class ParameterShard:
    """A parameter as one device sees it: the arrays beside this are its parts of it, of its gradient and of its moments.

    Sums are over each own array alone (a layer's, an expert's), and leave dimensions of 1, so that they fit the shard again.

    Attributes:
        places: For each dimension, the mesh axes that it is split over.
    """

    parameter: Parameter
    places: tuple[MeshAxes, ...]

    @classmethod
    def of(cls, parameter: Parameter) -> "ParameterShard":
        """The shard in the layout that is being traced for."""
        layout = current_layout()
        places = ((),) * len(parameter.shape) if layout is None else layout.storage(parameter.axes, parameter.shape)
        return cls(parameter, tuple(places))

    def over(self, dims: Iterable[int]) -> MeshAxes:
        """The mesh axes that some dimensions are split over."""
        return tuple(axis for dim in dims for axis in self.places[dim])

    def total(self, x: Any, dims: tuple[int, ...] | None = None) -> jax.Array:
        """The sums of `x` over `dims` (by default those of an own array), those on other devices included."""
        dims = self.parameter.own if dims is None else dims
        with tag_comm("optimizer"):
            return all_reduce(jnp.sum(x, dims, keepdims=True, dtype=accumulation_dtype(x.dtype)), self.over(dims))

    def mean(self, x: Any, dims: tuple[int, ...] | None = None) -> jax.Array:
        """The means of `x` over `dims`."""
        dims = self.parameter.own if dims is None else dims
        return self.total(x, dims) / math.prod(self.parameter.shape[dim] for dim in dims)

    def norm(self, x: Any, dims: tuple[int, ...] | None = None) -> jax.Array:
        """The Euclidean norms of `x` over `dims`."""
        return jnp.sqrt(self.total(jnp.square(x.astype(accumulation_dtype(x.dtype))), dims))

    def bits(self, what: str, count: jax.Array) -> jax.Array:
        """32 random bits for each element of this shard: the same for an element on every mesh.

        Args:
            what: They are for.
            count: Another number, other bits.
        """
        layout = current_layout()
        places = []
        for dim, (whole, axes) in enumerate(zip(self.parameter.shape, self.places)):
            parts = 1 if layout is None else math.prod(layout.sizes[axis] for axis in axes)
            index = jnp.arange(whole // parts, dtype=jnp.uint32)
            if axes:
                index = index + jax.lax.axis_index(axes).astype(jnp.uint32) * jnp.uint32(whole // parts)
            places.append(index.reshape(*(-1 if other == dim else 1 for other in range(len(self.places)))))
        return bits_of_places(f"{self.parameter.name} {what}", count, places)


def partition_spec(axes: Axes, shape: tuple[int, ...]) -> PartitionSpec:
    """Where an array with these logical axes rests, in the layout that is being traced for."""
    layout = current_layout()
    return PartitionSpec() if layout is None else PartitionSpec(*as_spec(layout.storage(axes, shape)))


def shard_map_over_params(function: Callable[..., Any], arguments: Any, results: Any) -> Callable[..., Any]:
    """`function` of whole arrays, run on each device's shards of them; itself where no mesh is being traced for.

    Args:
        arguments: Where its arguments lie: like them, with a `PartitionSpec` for each array.
        results: The same for what it returns.
    """
    layout = current_layout()
    if layout is None:
        return function
    return map_over_shards(function, layout, arguments, results)
