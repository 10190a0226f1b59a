"""Token and position embeddings, and the output head."""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from ..core import Module, current_layout, normal, own_sequence, parameter, scatter_sequence
from ..core.collectives import axis_index
from ..core.module import Initialiser
from ..core.protocols import Axes
from ..core.weights import Source, is_weight, opened


class Embedding(Module):
    """A vector for each token."""

    table: Float[Array, "vocab embed"] = parameter(normal(std=0.02))

    def __call__(self, tokens: Int[Array, "batch seq"], dtype: Any) -> Float[Array, "batch residual embed"]:
        """Where the vocabulary is split, each device looks up the tokens that are its own, and the parts are added up."""
        layout = current_layout()
        split = () if layout is None else layout.compute(("vocab",))[0]
        if not split:
            return _look_up("vocab embed", dtype, self.table, own_sequence(tokens))
        rows = vocabulary_rows(self.table)
        local = tokens - (axis_index(split) * rows).astype(tokens.dtype)
        inside = (local >= 0) & (local < rows)
        # A token of another device reads no row and adds to none.
        part = _look_up("vocab embed", dtype, self.table, jnp.where(inside, local, rows))
        return scatter_sequence(part)


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


def vocabulary_rows(table: Any) -> int:
    """How many words this device holds of an embedding or a head."""
    return (table.value if is_weight(table) else table).shape[0]


class _Static(NamedTuple):
    source: Source
    dtype: str
    rows: int


def _look_up(axes: str, dtype: Any, table: Any, index: jax.Array) -> jax.Array:
    source, value, slot = opened(table, tuple(axes.split()))
    return _take(_Static(source, jnp.dtype(dtype).name, value.shape[0]), value, slot, index)


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
