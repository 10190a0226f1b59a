"""One product of two arrays: where its accumulation, its layout and, where one pays, its orientation are decided."""

from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec


def product(equation: str, a: jax.Array, b: jax.Array, out_dtype: Any, out_spec: PartitionSpec | None) -> jax.Array:
    """`einsum(equation, a, b)`, accumulated in float32, laid out as `out_spec`.

    Args:
        equation: Single letters, as `jnp.einsum` takes them.
        out_dtype: What the float32 sums are rounded to.
        out_spec: The result's layout on an explicit mesh; None outside of a mesh.
    """
    out = jnp.einsum(equation, a, b, preferred_element_type=jnp.float32, out_sharding=out_spec)
    return out.astype(out_dtype)
