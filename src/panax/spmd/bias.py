"""Adding a parameter to every row: a bias, whose gradient is a sum over all rows."""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from ..kernels.product import sum_of_rows
from .weights import Opened, open_weight


def add_bias(x: Float[Array, "..."], w: Any, axes: str) -> Float[Array, "..."]:
    """`x` plus a parameter, whose axes are the last ones of `x`; the sum in the dtype of `x`.

    The parameter's gradient is summed in float32 and arrives in its own dtype and layout.

    Args:
        axes: The parameter's logical axes, separated by spaces.

    >>> add_bias(jnp.ones((2, 3)), jnp.arange(3.0), "norm").tolist()
    [[1.0, 2.0, 3.0], [1.0, 2.0, 3.0]]
    """
    opened = open_weight(w, axes, x.dtype)
    return _add_bias(opened.slot.dtype.name, x, opened)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _add_bias(gradient_dtype: str, x: jax.Array, w: Opened) -> jax.Array:
    return _forward(gradient_dtype, x, w)[0]


def _forward(gradient_dtype: str, x: jax.Array, w: Opened) -> tuple[jax.Array, Any]:
    # The shape alone: nothing is kept for the backward pass.
    return x + w.value.reshape((1,) * (x.ndim - w.value.ndim) + w.value.shape), jnp.zeros((0, *w.value.shape), x.dtype)


def _backward(gradient_dtype: str, saved: jax.Array, gradient: jax.Array) -> tuple[Any, Any]:
    shape = saved.shape[1:]
    sums = sum_of_rows(gradient.reshape(-1, math.prod(shape))).reshape(shape)
    return gradient, Opened(None, sums.astype(gradient_dtype))  # pyright: ignore[reportArgumentType]


_add_bias.defvjp(_forward, _backward)
