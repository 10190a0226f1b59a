"""The experts' whole feed-forward in one loop over chunks of rows: the fast way on the CPU in float32.

Between one product and the next a chunk's values stay in the cache; product by product they would be written to memory and
read again, which costs a quarter of the time. Forward and backward are a loop each, and the backward pass keeps only what the
first products gave.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float

from panax.kernels.grouped_blocked import map_groups
from panax.kernels.grouped_rows import Groups

Activation = Callable[[jax.Array], jax.Array]


class Matrices(NamedTuple):
    """Of all groups; no gate where there is None."""

    gate: Float[Array, "group embed ffn"] | None
    up: Float[Array, "group embed ffn"]
    down: Float[Array, "group ffn embed"]


def chunked_feed_forward(
    activation: Activation,
    rows: Float[Array, "row embed"],
    weight: Float[Array, " row"],
    values: Matrices,
    slots: Matrices,
    groups: Groups,
    *,
    name: str,
) -> Float[Array, "row embed"]:
    """`(weight * activation(rows · gate) * (rows · up)) · down`, each row with its group's matrices.

    Args:
        slots: Zeros that are never read: they take the gradients of `values`.
        name: For rematerialisation policies, of the products that the backward pass needs.

    Returns:
        Unspecified for the rows of unused tiles.
    """
    return _feed_forward(activation, name, rows, weight, values, slots, groups)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _feed_forward(
    activation: Activation, name: str, rows: Any, weight: Any, values: Any, slots: Any, groups: Any
) -> Any:
    return _forward(activation, name, rows, weight, values, slots, groups)[0]


def _forward(
    activation: Activation, name: str, rows: Any, weight: Any, values: Matrices, slots: Matrices, groups: Groups
) -> tuple[jax.Array, Any]:
    def chunk(own: Matrices, rows: Any) -> tuple[Any, tuple]:
        x, weight = rows
        inner = _Inner(None if own.gate is None else x @ own.gate, x @ own.up)
        return (inner, (_hidden(activation, inner) * weight[:, None]) @ own.down), ()

    (inner, y), _ = map_groups(chunk, (rows, weight), values, groups)
    inner = jax.tree.map(lambda leaf: checkpoint_name(leaf, name), inner)
    return y, (rows, weight, inner, values, groups)


def _backward(activation: Activation, name: str, saved: Any, gradient: jax.Array) -> tuple[Any, ...]:
    rows, weight, inner, values, groups = saved

    def chunk(own: Matrices, rows: Any) -> tuple[Any, Matrices]:
        x, weight, inner, dy = rows
        hidden, pull = jax.vjp(lambda inner: _hidden(activation, inner), inner)
        d_weighted = dy @ own.down.T
        (d_inner,) = pull(d_weighted * weight[:, None])
        dx = d_inner.up @ own.up.T
        d_gate = None
        if own.gate is not None:
            dx, d_gate = dx + d_inner.gate @ own.gate.T, x.T @ d_inner.gate
        d_down = (hidden * weight[:, None]).T @ dy
        return (dx, (d_weighted * hidden).sum(axis=1)), Matrices(d_gate, x.T @ d_inner.up, d_down)

    (dx, d_weight), sums = map_groups(chunk, (rows, weight, inner, gradient), values, groups)
    return dx, d_weight, None, sums, None


_feed_forward.defvjp(_forward, _backward)


class _Inner(NamedTuple):
    gate: jax.Array | None
    up: jax.Array


def _hidden(activation: Activation, inner: _Inner) -> jax.Array:
    return activation(inner.up) if inner.gate is None else activation(inner.gate) * inner.up
