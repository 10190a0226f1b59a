"""The experts' whole feed-forward in one loop over chunks of rows: the fast implementation on the CPU in
float32.

A chunk's values stay in the cache between matmuls; with separate matmuls they would be written to memory and
read again, which costs a quarter of the time. Forward and backward are one loop each, and only the results of
the first matmuls are stored for the backward pass.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
from jaxtyping import Array, Float

from panax.kernels.grouped.rows import Groups
from panax.kernels.grouped.xla_loops import map_groups

Activation = Callable[[jax.Array], jax.Array]


class FeedForwardMatrices(NamedTuple):
    """Matrices of all groups; gate is None without a gate."""

    gate: Float[Array, "group embed ffn"] | None
    up: Float[Array, "group embed ffn"]
    down: Float[Array, "group ffn embed"]


class HiddenProjections(NamedTuple):
    """Results of the first matmuls for all rows, stored for the backward pass."""

    gate: Float[Array, "row ffn"] | None
    up: Float[Array, "row ffn"]


def chunked_feed_forward(
    activation: Activation,
    rows: Float[Array, "row embed"],
    weight: Float[Array, " row"],
    matrices: FeedForwardMatrices,
    groups: Groups,
) -> tuple[Float[Array, "row embed"], HiddenProjections]:
    """Compute `(weight * activation(rows · gate) * (rows · up)) · down`, each row with its group's matrices.

    Returns:
        The result, unspecified for the rows of unused tiles, and the values that the gradients need.
    """

    def chunk(group_matrices: FeedForwardMatrices, rows: Any) -> tuple[Any, tuple]:
        x, weight = rows
        inner = HiddenProjections(
            None if group_matrices.gate is None else x @ group_matrices.gate, x @ group_matrices.up
        )
        return (inner, (_hidden(activation, inner) * weight[:, None]) @ group_matrices.down), ()

    (inner, y), _ = map_groups(chunk, (rows, weight), matrices, groups)
    return y, inner


def chunked_feed_forward_gradients(
    activation: Activation,
    rows: Float[Array, "row embed"],
    weight: Float[Array, " row"],
    inner: HiddenProjections,
    matrices: FeedForwardMatrices,
    groups: Groups,
    gradient: Float[Array, "row embed"],
) -> tuple[Float[Array, "row embed"], Float[Array, " row"], FeedForwardMatrices]:
    """Compute the gradients of `rows`, `weight` and `matrices`."""

    def chunk(group_matrices: FeedForwardMatrices, rows: Any) -> tuple[Any, FeedForwardMatrices]:
        x, weight, inner, dy = rows
        hidden, pull = jax.vjp(lambda inner: _hidden(activation, inner), inner)
        d_weighted = dy @ group_matrices.down.T
        (d_inner,) = pull(d_weighted * weight[:, None])
        dx = d_inner.up @ group_matrices.up.T
        d_gate = None
        if group_matrices.gate is not None:
            dx, d_gate = dx + d_inner.gate @ group_matrices.gate.T, x.T @ d_inner.gate
        d_down = (hidden * weight[:, None]).T @ dy
        return (dx, (d_weighted * hidden).sum(axis=1)), FeedForwardMatrices(d_gate, x.T @ d_inner.up, d_down)

    (dx, d_weight), sums = map_groups(chunk, (rows, weight, inner, gradient), matrices, groups)
    return dx, d_weight, sums


def _hidden(activation: Activation, inner: HiddenProjections) -> jax.Array:
    return activation(inner.up) if inner.gate is None else activation(inner.gate) * inner.up
