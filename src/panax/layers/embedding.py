"""Token and position embeddings, and the output head."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from ..core import Module, current_layout, gather, normal, parameter


class Embedding(Module):
    """A vector for each token."""

    table: Float[Array, "vocab embed"] = parameter(normal(std=0.02))

    def __call__(self, tokens: Int[Array, "batch seq"], dtype: Any) -> Float[Array, "batch seq embed"]:
        return _look_up("vocab embed", jnp.dtype(dtype).name, self.table, tokens)


class PositionEmbedding(Module):
    """A learned vector for each position."""

    table: Float[Array, "position embed"] = parameter(normal(std=0.02))

    def __call__(self, position: Int[Array, "batch seq"], dtype: Any) -> Float[Array, "batch seq embed"]:
        return _look_up("position embed", jnp.dtype(dtype).name, self.table, position)


class Head(Module):
    """The projection from the residual stream to the vocabulary, stored like the embedding it may be tied to."""

    table: Float[Array, "vocab embed"] = parameter(normal("embed"))


def _rows(table: jax.Array, index: jax.Array) -> jax.Array:
    layout = current_layout()
    spec = None if layout is None else layout.compute_spec(("batch", "seq", "embed"))
    return table.at[index].get(out_sharding=spec)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _look_up(axes: str, dtype: str, table: jax.Array, index: jax.Array) -> jax.Array:
    return _rows(gather(table, axes, dtype), index)


def _look_up_forward(axes: str, dtype: str, table: jax.Array, index: jax.Array) -> tuple[jax.Array, Any]:
    return _look_up(axes, dtype, table, index), (table, index)


def _look_up_backward(axes: str, dtype: str, saved: Any, gradient: jax.Array) -> tuple[jax.Array, None]:
    # A frequent token's gradient is a sum of thousands: it is added up in the parameter's own precision.
    table, index = saved
    _, pull = jax.vjp(lambda t: _rows(gather(t, axes, t.dtype), index), table)
    return (*pull(gradient.astype(table.dtype)), None)


_look_up.defvjp(_look_up_forward, _look_up_backward)
