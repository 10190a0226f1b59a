"""Bias addition, with a gradient that is summed over all rows in float32."""

import dataclasses
import math
from typing import Any

import jax
from jaxtyping import Array, Float

from ..kernels.product import sum_rows
from .product import WeightOp, apply_weight_op
from .weights import GatheredWeight, gather_weight


def add_bias(x: Float[Array, "..."], w: Any, axes: str) -> Float[Array, "..."]:
    """Add a parameter to the last dimensions of `x`, in the dtype of `x`.

    The parameter's gradient is summed in float32, then returned in the parameter's dtype and storage layout.

    Args:
        axes: Logical axes of the parameter, separated by spaces.

    >>> from jax import numpy as jnp
    >>> add_bias(jnp.ones((2, 3)), jnp.arange(3.0), "norm").tolist()
    [[1.0, 2.0, 3.0], [1.0, 2.0, 3.0]]
    """
    opened = gather_weight(w, axes, x.dtype)
    return apply_weight_op(_Bias(opened.value.ndim), x, opened)


@dataclasses.dataclass(frozen=True)
class _Bias(WeightOp):
    """Addition of a parameter with `ndim` dimensions. Saves no residuals for the backward pass."""

    ndim: int

    def forward(self, inputs: jax.Array, *weights: GatheredWeight) -> tuple[jax.Array, Any]:
        bias = weights[0].value
        return inputs + bias.reshape((1,) * (inputs.ndim - self.ndim) + bias.shape), ()

    def backward(self, saved: Any, gradient: jax.Array, *dtypes: Any) -> tuple[jax.Array, list[jax.Array]]:
        shape = gradient.shape[gradient.ndim - self.ndim :]
        sums = sum_rows(gradient.reshape(-1, math.prod(shape))).reshape(shape)
        return gradient, [sums.astype(dtypes[0])]
