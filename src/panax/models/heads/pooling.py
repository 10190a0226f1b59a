"""Pooling: one vector for each row, from those of its positions."""

from typing import Literal

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

Pooling = Literal["last", "mean", "first"]
"""The last position that is not padding, which has read the whole text; the mean of all of them; or the first one."""


def pooling_weights(valid: Bool[Array, "batch seq"], pooling: Pooling) -> Float[Array, "batch seq"]:
    """Return the weight of each position in its row's vector; zeros for a row of padding.

    >>> valid = jnp.array([[True, True, True, False], [False, True, False, False]])
    >>> pooling_weights(valid, "last").tolist()
    [[0.0, 0.0, 1.0, 0.0], [0.0, 1.0, 0.0, 0.0]]
    """
    real = valid.astype(jnp.float32)
    if pooling == "mean":
        return real / jnp.maximum(real.sum(axis=1, keepdims=True), 1.0)
    before = jnp.cumsum(real, axis=1)
    chosen = before == (1.0 if pooling == "first" else before[:, -1:])
    return real * chosen.astype(jnp.float32)


def pool(hidden: Float[Array, "batch seq embed"], weights: Float[Array, "batch seq"]) -> Float[Array, "batch embed"]:
    """Return each row's weighted sum of hidden states, in float32."""
    return jnp.einsum("bse,bs->be", hidden.astype(jnp.float32), weights)
