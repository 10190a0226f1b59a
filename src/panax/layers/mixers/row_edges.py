"""Edges between the parts of rows that devices hold: the positions before a device's part that its short
convolution reads.
"""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool

from ...core.errors import LayoutError
from ...core.layout.layout import axis_size, row_order
from ...spmd import shift_right

CONTEXT = "context"
"""The mesh axis that shards rows."""


def edges_before(
    inputs: Sequence[jax.Array], segment: jax.Array | None, tail: int
) -> tuple[list[jax.Array] | None, jax.Array | None]:
    """Return the last `tail` positions of the previous device's part, of each input and of the segments; None
    if rows are not sharded.

    Args:
        inputs: Arrays "batch seq ...".

    Raises:
        LayoutError: The rows are not in contiguous order, or a device's part is shorter than the tail.
    """
    size = axis_size(CONTEXT)
    if size == 1:
        return None, None
    if row_order() != "contiguous":
        raise LayoutError(
            f"a recurrent layer needs contiguous rows over {CONTEXT}={size}, and the task's are in zigzag order; "
            f'set row_order = "contiguous" in the task'
        )
    length = inputs[0].shape[1]
    if length < tail:
        raise LayoutError(
            f"each device holds {length} positions of a row, and the convolution reads {tail} before each; use a smaller "
            f"{CONTEXT} axis, or longer rows"
        )
    if not tail:
        return None, None
    return [_handed_on(part[:, -tail:]) for part in inputs], None if segment is None else _handed_on(segment[:, -tail:])


def last_inputs(
    before: Sequence[jax.Array],
    inputs: Sequence[jax.Array],
    tail: int,
    valid: Bool[Array, "batch seq"] | None = None,
) -> list[jax.Array]:
    """Return the last `tail` positions of each input, for a cache: those of `before` too if the input is shorter.

    Args:
        before: The cached positions before the inputs, `tail` of them.
        valid: False after a row's last position; None if all rows are as long as the inputs.
    """
    both = [jnp.concatenate([old, new.astype(old.dtype)], axis=1) for old, new in zip(before, inputs, strict=True)]
    if valid is None:
        return [each[:, each.shape[1] - tail :] for each in both]
    ends = valid.sum(axis=1, dtype=jnp.int32)
    cut = jax.vmap(lambda row, end: jax.lax.dynamic_slice_in_dim(row, end, tail, axis=0))
    return [cut(each, ends) for each in both]


def _handed_on(edge: jax.Array) -> jax.Array:
    return shift_right(edge, CONTEXT)  # pyright: ignore[reportReturnType]
