"""Rematerialization: what the backward pass saves and what it recomputes."""

from collections.abc import Callable
from typing import Any, Literal

import jax

from ..core import current_layout
from ..core.params.logical import Role, axis_for_role
from ..spmd.composite.quantized_weight import DEQUANTIZED
from ..spmd.contraction import PRODUCT
from ..spmd.weight_gather import DECODED
from ..spmd.weights import GATHERED

ATTENTION = "attention"
"""Checkpoint name of the attention output."""

EXCHANGED_ROWS = "exchanged_rows"
"""Checkpoint name of rows received from other devices for their experts."""

RematPolicy = Literal["none", "products", "full"]
"""none: save every intermediate value (fastest, most memory). products: save the results of matmuls and
attention, and rows that experts received from other devices; recompute the cheap rest. full: save only each
layer's input (one more forward pass, least memory)."""


def rematerialize(function: Callable[..., Any], policy: RematPolicy) -> Callable[..., Any]:
    """Wrap one layer so that its backward pass follows `policy`.

    Gathered weights are never saved, whatever the policy; the backward pass gathers them again.
    """
    # The debugger runs layers eagerly; jax.checkpoint would trace them.
    if jax.config.jax_disable_jit:  # pyright: ignore[reportAttributeAccessIssue]
        return function
    policies = jax.checkpoint_policies
    if policy == "full":
        return jax.checkpoint(function)
    if policy == "products":
        return jax.checkpoint(function, policy=policies.save_only_these_names(PRODUCT, ATTENTION, EXCHANGED_ROWS))
    if not _gathers():
        return function
    return jax.checkpoint(function, policy=_all_but_gathered)


def _all_but_gathered(primitive: Any, *_: Any, **parameters: Any) -> bool:
    # Exclude both the named copy and the unnamed array behind it.
    decodes = primitive is DECODED or primitive is DEQUANTIZED
    return primitive.name != "all_gather" and not decodes and parameters.get("name") != GATHERED


def _gathers() -> bool:
    """Return True if parameters are stored with another sharding than they are computed with."""
    layout, width = current_layout(), (axis_for_role(Role.WIDTH),)
    return layout is not None and layout.storage(width) != layout.compute(width)
