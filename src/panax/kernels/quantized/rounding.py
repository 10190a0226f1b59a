"""Stochastic rounding: up or down at random, so that the mean of the rounded values is the original."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, BFloat16, Float32, UInt32


def round_stochastically(x: Float32[Array, "..."], bits: UInt32[Array, "..."]) -> BFloat16[Array, "..."]:
    """Round `x` to bfloat16: to the neighbor away from zero with a probability given by its nearness, else
    to the one towards zero.

    Updates of a parameter that are smaller than half the distance to the next bfloat16 would all be lost by
    rounding to nearest; here they survive in the mean (arXiv:2010.06192).

    Args:
        bits: Random bits of x's shape, 16 of each are used.

    >>> ones = jnp.full((4,), 1 + 2**-9, jnp.float32)
    >>> round_stochastically(ones, jnp.array([0, 2**14, 2**15, 3 * 2**14], jnp.uint32)).tolist()
    [1.0, 1.0, 1.0, 1.0078125]
    """
    word = jax.lax.bitcast_convert_type(x, jnp.uint32)
    rounded = (word + (bits & jnp.uint32(0xFFFF))) & jnp.uint32(0xFFFF0000)
    return jnp.where(jnp.isfinite(x), jax.lax.bitcast_convert_type(rounded, jnp.float32), x).astype(jnp.bfloat16)
