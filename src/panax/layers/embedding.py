"""Token and position embeddings, and the output head."""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from ..core import Module, current_layout, normal, parameter
from ..core.errors import LayoutError
from ..core.layout import MeshAxes
from ..core.module import Initialiser
from ..core.protocols import Axes
from ..spmd import own_sequence, scatter_sequence, sequence_parallel_axes, token_axes
from ..spmd.collectives import all_reduce, axis_index
from ..spmd.weights import Source, opened


class Embedding(Module):
    """A vector for each token."""

    table: Float[Array, "vocab embed"] = parameter(normal(std=0.02))

    def __call__(self, tokens: Int[Array, "batch seq"], dtype: Any) -> Float[Array, "batch residual embed"]:
        """Where the vocabulary is split, each device looks up the tokens that are its own, and the parts are added up.

        Raises:
            LayoutError: The vocabulary is split over axes that split the tokens, or over others than the residual stream is.
        """
        layout = current_layout()
        split = () if layout is None else layout.compute(("vocab",))[0]
        if not split:
            return _look_up("vocab embed", dtype, self.table, own_sequence(tokens))
        _check_split(split)
        rows = _rows_here(self.table, "vocab embed")
        local = tokens - (axis_index(split) * rows).astype(tokens.dtype)
        inside = (local >= 0) & (local < rows)
        # A token of another device reads no row and adds to none.
        part = _look_up("vocab embed", dtype, self.table, jnp.where(inside, local, rows))
        return scatter_sequence(part) if sequence_parallel_axes() else _sum_whole(split, part)


class PositionEmbedding(Module):
    """A learned vector for each position."""

    table: Float[Array, "position embed"] = parameter(normal(std=0.02))

    def __call__(self, position: Int[Array, "batch seq"], dtype: Any) -> Float[Array, "batch residual embed"]:
        return _look_up("position embed", dtype, self.table, own_sequence(position))


class Head(Module):
    """The projection from the residual stream to the vocabulary, stored like the embedding it may be tied to."""

    table: Float[Array, "vocab embed"] = parameter(normal("embed"))


def padded(init: Initialiser, rows: int) -> Initialiser:
    """As `init`, with zeros past the first `rows` words. Nothing has a gradient there, so zeros they stay."""

    def draw(key: jax.Array, shape: tuple[int, ...], axes: Axes) -> jax.Array:
        real = jax.lax.broadcasted_iota(jnp.int32, shape, 0) < rows
        return jnp.where(real, init(key, shape, axes), 0.0)

    return draw


def _check_split(split: MeshAxes) -> None:
    over, tokens = sequence_parallel_axes(), [axis for axis in split if axis in token_axes()]
    if tokens:
        raise LayoutError(
            f"rules.compute: vocab -> {split}, and {tokens[0]} splits the tokens; devices that look up different tokens can't "
            f"share a vocabulary: split it over tensor"
        )
    if over and set(over) != set(split):
        raise LayoutError(
            f"rules.compute: vocab is split over {split}, and the positions of the residual stream over {over}; split both over "
            f"the same mesh axes, or only one of them"
        )


def _rows_here(table: Any, axes: str) -> int:
    """How many rows of a table this device looks up: those that it holds, and those that are gathered for it."""
    source, value, _ = opened(table, tuple(axes.split()))
    ways = 1 if source.gathered or not source.gathers[0] else jax.lax.axis_size(source.gathers[0])
    return value.shape[0] * ways


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _sum_whole(axes: MeshAxes, part: jax.Array) -> jax.Array:
    """Partial sums, added up on every device. The cotangent that each device has of a whole residual stream is a share of it."""
    return all_reduce(part, axes)


_sum_whole.defvjp(
    lambda axes, part: (all_reduce(part, axes), None),
    lambda axes, _, gradient: (all_reduce(gradient, axes),),
)


class _Static(NamedTuple):
    source: Source
    dtype: str
    rows: int


def _look_up(axes: str, dtype: Any, table: Any, index: jax.Array) -> jax.Array:
    source, value, slot = opened(table, tuple(axes.split()))
    return _take(_Static(source, jnp.dtype(dtype).name, _rows_here(table, axes)), value, slot, index)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _take(static: _Static, value: jax.Array, slot: jax.Array | None, index: jax.Array) -> jax.Array:
    return static.source.place(value, static.dtype).at[index].get(mode="fill", fill_value=0)


def _take_forward(
    static: _Static, value: jax.Array, slot: jax.Array | None, index: jax.Array
) -> tuple[jax.Array, jax.Array]:
    return _take(static, value, slot, index), index


def _take_backward(static: _Static, index: jax.Array, gradient: jax.Array) -> tuple[Any, Any, None]:
    # A frequent token's gradient is a sum of thousands: it is added up in the parameter's own precision.
    wide = gradient.astype(static.source.dtype)
    whole = jnp.zeros((static.rows, gradient.shape[-1]), static.source.dtype)
    gradient = static.source.returned(whole.at[index].add(wide, mode="drop"))
    return (None, gradient, None) if static.source.gathered else (gradient, None, None)


_take.defvjp(_take_forward, _take_backward)
