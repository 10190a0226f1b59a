"""Initial step sizes and decay rates of recurrent mixers."""

import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from ...core.params.module import Initializer
from ...core.protocols import Axes


def quantiles(quantile: Callable[[float], float], count: int = 4096) -> Initializer:
    """Build an initializer that draws one of `count` equally likely values of a quantile function on (0, 1).

    Values are computed on the host and drawn by integer index: a logarithm's last bit depends on how a
    compiler splits an array.
    """
    table = np.asarray([quantile((i + 0.5) / count) for i in range(count)], np.float32)

    def draw(key: jax.Array, shape: tuple[int, ...], axes: Axes) -> jax.Array:
        return jnp.asarray(table)[jax.random.bits(key, shape, jnp.uint32) % count]

    return draw


def first_step(share: float) -> float:
    """Return the inverse softplus of a step size between 0.001 and 0.1, log-uniform in `share`."""
    step = 0.001 * 100.0**share
    return step + math.log(-math.expm1(-step))
