"""What the backward pass keeps, and what it computes again."""

from collections.abc import Callable
from typing import Any, Literal

import jax

RematPolicy = Literal["none", "products", "full"]
"""none: keep every intermediate value (fastest, most memory). products: keep the results of matrix products and of attention,
compute the cheap rest again. full: keep only each layer's input (one more forward pass, least memory)."""


def rematerialise(function: Callable[..., Any], policy: RematPolicy) -> Callable[..., Any]:
    """Wrap one layer so that its backward pass keeps what `policy` says."""
    # The debugger runs layers eagerly; jax.checkpoint would trace them.
    if policy == "none" or jax.config.jax_disable_jit:
        return function
    if policy == "full":
        return jax.checkpoint(function)
    return jax.checkpoint(function, policy=jax.checkpoint_policies.save_only_these_names("product", "attention"))
