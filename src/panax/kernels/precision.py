"""Accumulation dtype of matmuls."""

import jax.numpy as jnp
from jax.typing import DTypeLike


def accumulation_dtype(dtype: DTypeLike) -> jnp.dtype:
    """Return float32 for every narrower dtype, the dtype itself for float64.

    >>> accumulation_dtype("bfloat16"), accumulation_dtype("float64")
    (dtype('float32'), dtype('float64'))
    """
    dtype = jnp.dtype(dtype)
    return dtype if dtype.itemsize > 4 else jnp.dtype(jnp.float32)
