"""One product of two arrays: where its accumulation and, where one pays, its orientation are decided."""

from typing import Any

import jax
import jax.numpy as jnp


def product(equation: str, a: jax.Array, b: jax.Array, out_dtype: Any) -> jax.Array:
    """`einsum(equation, a, b)`, accumulated in float32.

    Args:
        equation: Single letters, as `jnp.einsum` takes them.
        out_dtype: What the float32 sums are rounded to.
    """
    return jnp.einsum(equation, a, b, preferred_element_type=jnp.float32).astype(out_dtype)
