"""What the backward pass keeps, and what it computes again."""

from collections.abc import Callable
from typing import Any, Literal

import jax

from ..core import current_layout
from ..core.logical import Role, axis_of
from ..spmd.contraction import PRODUCT
from ..spmd.gathering import DECODED
from ..spmd.weights import GATHERED

ATTENTION = "attention"
"""The name of what attention gives."""

EXCHANGED = "exchanged_rows"
"""The name of rows that came from other devices to their experts."""

RematPolicy = Literal["none", "products", "full"]
"""none: keep every intermediate value (fastest, most memory). products: keep the results of matrix products and of attention and
what experts took in from other devices, compute the cheap rest again. full: keep only each layer's input (one more forward pass,
least memory)."""


def rematerialize(function: Callable[..., Any], policy: RematPolicy) -> Callable[..., Any]:
    """Wrap one layer so that its backward pass keeps what `policy` says.

    A weight that was gathered over devices is never kept, whatever the policy: it is gathered again.
    """
    # The debugger runs layers eagerly; jax.checkpoint would trace them.
    if jax.config.jax_disable_jit:  # pyright: ignore[reportAttributeAccessIssue]
        return function
    policies = jax.checkpoint_policies
    if policy == "full":
        return jax.checkpoint(function)
    if policy == "products":
        return jax.checkpoint(function, policy=policies.save_only_these_names(PRODUCT, ATTENTION, EXCHANGED))
    if not _gathers():
        return function
    return jax.checkpoint(function, policy=_all_but_gathered)


def _all_but_gathered(primitive: Any, *_: Any, **parameters: Any) -> bool:
    # Neither the named copy nor the unnamed array that the name was given to.
    return primitive.name != "all_gather" and primitive is not DECODED and parameters.get("name") != GATHERED


def _gathers() -> bool:
    """Whether parameters are stored otherwise than they are computed with."""
    layout, width = current_layout(), (axis_of(Role.WIDTH),)
    return layout is not None and layout.storage(width) != layout.compute(width)
