"""Adding a parameter to every row: a bias, whose gradient is a sum over all rows."""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from ..core.product import sum_of_rows
from .weights import Source, opened


def add_bias(x: Float[Array, "..."], w: Any, axes: str) -> Float[Array, "..."]:
    """`x` plus a parameter, whose axes are the last ones of `x`; the sum in the dtype of `x`.

    The parameter's gradient is summed in float32 and arrives in its own dtype and layout.

    Args:
        axes: The parameter's logical axes, separated by spaces.

    >>> add_bias(jnp.ones((2, 3)), jnp.arange(3.0), "norm").tolist()
    [[1.0, 2.0, 3.0], [1.0, 2.0, 3.0]]
    """
    source, value, slot = opened(w, tuple(axes.split()))
    return _add_bias(source, x, value, slot)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _add_bias(source: Source, x: jax.Array, value: jax.Array, slot: jax.Array | None) -> jax.Array:
    return _forward(source, x, value, slot)[0]


def _forward(source: Source, x: jax.Array, value: jax.Array, slot: jax.Array | None) -> tuple[jax.Array, Any]:
    placed = source.place(value, x.dtype)
    # The shape alone: nothing is kept for the backward pass.
    return x + placed.reshape((1,) * (x.ndim - placed.ndim) + placed.shape), jnp.zeros((0, *placed.shape), x.dtype)


def _backward(source: Source, saved: jax.Array, gradient: jax.Array) -> tuple[Any, Any, Any]:
    shape = saved.shape[1:]
    sums = sum_of_rows(gradient.reshape(-1, math.prod(shape))).reshape(shape)
    dw = source.returned(sums)
    return (gradient, None, dw) if source.gathered else (gradient, dw, None)


_add_bias.defvjp(_forward, _backward)
