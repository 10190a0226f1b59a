"""Local view of a parameter and the cross-device reductions that optimizers need."""

import dataclasses
import math
from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from ...core.layout.declarations import tag_comm
from ...core.layout.layout import MeshAxes, current_layout
from ...core.params.counter_rng import element_bits
from ...core.protocols import Axes
from ...kernels.precision import accumulation_dtype
from ...mesh.placement import partition_entries
from ...spmd.collectives import all_reduce
from ...spmd.manual import map_over_shards
from ..parameter import Parameter


@dataclasses.dataclass(frozen=True)
class ParameterShard:
    """A parameter as seen by one device; the arrays passed with it are local shards of its value, gradient
    and moments.

    Reductions run over each stacked array separately (a layer's, an expert's) and keep dimensions of size 1,
    so that they broadcast against the shard.

    Attributes:
        dim_axes: For each dimension, the mesh axes that shard it.
    """

    parameter: Parameter
    dim_axes: tuple[MeshAxes, ...]

    @classmethod
    def of(cls, parameter: Parameter) -> "ParameterShard":
        """Describe the parameter's shard under the current layout."""
        layout = current_layout()
        places = ((),) * len(parameter.shape) if layout is None else layout.storage(parameter.axes, parameter.shape)
        return cls(parameter, tuple(places))

    def split_axes(self, dims: Iterable[int]) -> MeshAxes:
        """Return the mesh axes that shard the given dimensions."""
        return tuple(axis for dim in dims for axis in self.dim_axes[dim])

    def total(self, x: Any, dims: tuple[int, ...] | None = None) -> jax.Array:
        """Sum `x` over `dims` (default: those of a single array), across devices too."""
        dims = self.parameter.array_dims if dims is None else dims
        with tag_comm("optimizer"):
            return all_reduce(jnp.sum(x, dims, keepdims=True, dtype=accumulation_dtype(x.dtype)), self.split_axes(dims))

    def mean(self, x: Any, dims: tuple[int, ...] | None = None) -> jax.Array:
        """Average `x` over `dims`, across devices too."""
        dims = self.parameter.array_dims if dims is None else dims
        return self.total(x, dims) / math.prod(self.parameter.shape[dim] for dim in dims)

    def norm(self, x: Any, dims: tuple[int, ...] | None = None) -> jax.Array:
        """Compute the Euclidean norm of `x` over `dims`, across devices too."""
        return jnp.sqrt(self.total(jnp.square(x.astype(accumulation_dtype(x.dtype))), dims))

    def random_bits(self, purpose: str, count: jax.Array) -> jax.Array:
        """Draw 32 random bits for each element of this shard; the bits of an element are the same on every
        mesh.

        Args:
            purpose: Purpose of the bits, part of the seed.
            count: Step counter, part of the seed.
        """
        layout = current_layout()
        places = []
        for dim, (size, axes) in enumerate(zip(self.parameter.shape, self.dim_axes)):
            parts = 1 if layout is None else math.prod(layout.sizes[axis] for axis in axes)
            index = jnp.arange(size // parts, dtype=jnp.uint32)
            if axes:
                index = index + jax.lax.axis_index(axes).astype(jnp.uint32) * jnp.uint32(size // parts)
            places.append(index.reshape(*(-1 if other == dim else 1 for other in range(len(self.dim_axes)))))
        return element_bits(f"{self.parameter.name} {purpose}", count, places)


def partition_spec(axes: Axes, shape: tuple[int, ...]) -> PartitionSpec:
    """Return the storage sharding of an array with these logical axes, under the current layout."""
    layout = current_layout()
    return PartitionSpec() if layout is None else PartitionSpec(*partition_entries(layout.storage(axes, shape)))


def shard_map_over_params(function: Callable[..., Any], arguments: Any, results: Any) -> Callable[..., Any]:
    """Wrap `function` to run on each device's shards of its global arguments; return it unchanged without a
    current mesh.

    Args:
        arguments: A `PartitionSpec` for each array, in the structure of the arguments.
        results: The same for the return value.
    """
    layout = current_layout()
    if layout is None:
        return function
    return map_over_shards(function, layout, arguments, results)
