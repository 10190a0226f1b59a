"""Ulysses attention: an exchange of heads for positions, so that each device runs the ordinary kernel on
whole rows.

An all-to-all over the "context" mesh axis turns [all heads, part of the rows] into [part of the heads, whole
rows], and another one turns the output back. In between, rows in zigzag order (`context`) are restored to
their original order, by whole chunks. The fast kernels work unchanged; the axis cannot be larger than the
number of heads.

Source: DeepSpeed Ulysses (arXiv:2309.14509). Differs: for grouped queries, the few key-value heads are
repeated only until the axis divides them; gathering them on every device would never be fewer bytes.
"""

import functools
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from panax.kernels.precision import accumulation_dtype
from panax.parallel.context import ContextAxis, LocalSizes, WireBytes


def ulysses_attention(
    q: Float[Array, "batch seq heads head_dim"],
    k: Float[Array, "batch seq kv_heads head_dim"],
    v: Float[Array, "batch seq kv_heads head_dim"],
    segments: Int[Array, "batch seq"] | None,
    *,
    axis: ContextAxis,
    sinks: Float[Array, " heads"] | None = None,
    kernel: Callable[..., Array],
) -> Float[Array, "batch seq heads head_dim"]:
    """Compute attention over whole rows; this device holds its part of each; differentiable in q, k and v.

    Must be called with the axis manual: in `jax.shard_map(..., check_vma=False)`. Sent by each device:
    `ulysses_bytes`.

    Args:
        segments: Of the local tokens; 0 is padding.
        sinks: Sinks of all local heads before the exchange; the kernel receives those of the heads that it
            computes.
        kernel: Called once as `kernel(q, k, v, segments=segments, sinks=sinks)` with whole rows and part of the
            heads: `attention` with its other options bound.

    Raises:
        ValueError: The axis does not divide the query heads, or the local sequence, in zigzag order,
            cannot be cut into two equal chunks.
    """
    if axis.size == 1:
        return kernel(q, k, v, segments=segments, sinks=sinks)
    seq, heads = q.shape[1:3]
    _check_heads(heads, axis.size)
    if heads % k.shape[2]:
        raise ValueError(f"{heads=} must be a multiple of kv_heads={k.shape[2]}")
    if axis.order == "zigzag" and seq % 2:
        raise ValueError(
            f"a device's part of a row, {seq} tokens, can't be cut into two equal chunks; use a row length that is "
            f"divisible by 2 * {axis.name}={2 * axis.size}"
        )
    if segments is not None:
        segments = _to_row_order(lax.all_gather(segments, axis.name, axis=1, tiled=True), axis)
    copies = _sent_kv_heads(k.shape[2], axis.size) // k.shape[2]
    q, k, v = (_whole_rows(x, axis) for x in (q, _repeated(k, copies), _repeated(v, copies)))
    if sinks is not None:
        first = lax.axis_index(axis.name) * (heads // axis.size)
        sinks = lax.dynamic_slice_in_dim(sinks, first, heads // axis.size)
    return _whole_heads(kernel(q, k, v, segments=segments, sinks=sinks), axis)


def ulysses_bytes(sizes: LocalSizes, axis_size: int) -> WireBytes:
    """Count the bytes that one device sends in `ulysses_attention`.

    Of every exchanged array, a device keeps one part and sends the others: q, k, v and the output forward,
    their cotangents backward. The segments are all-gathered once, around the axis.

    >>> sizes = LocalSizes(batch=1, local_seq=1024, heads=32, kv_heads=8, head_dim=128, itemsize=2, packed=False)
    >>> ulysses_bytes(sizes, axis_size=4)
    WireBytes(forward=15728640, backward=15728640)
    """
    if axis_size == 1:
        return WireBytes(0, 0)
    columns = 2 * (sizes.heads + _sent_kv_heads(sizes.kv_heads, axis_size)) * sizes.head_dim
    positions = sizes.batch * sizes.local_seq
    exchanged = positions * columns * sizes.itemsize // axis_size * (axis_size - 1)
    segments = (axis_size - 1) * positions * 4 if sizes.packed else 0
    return WireBytes(exchanged + segments, exchanged)


def _sent_kv_heads(kv_heads: int, axis_size: int) -> int:
    """Return the number of key-value heads after repeating each equally often, the fewest that the axis
    divides."""
    return math.lcm(kv_heads, axis_size)


def _check_heads(heads: int, axis_size: int) -> None:
    limit = heads_limit(heads, axis_size)
    if limit is not None:
        raise ValueError(f"ulysses attention: {limit}")


def heads_limit(heads: int, axis_size: int) -> str | None:
    """Return why the axis cannot exchange `heads` query heads of a device; None if it divides them."""
    if heads % axis_size == 0:
        return None
    fitting = ", ".join(str(size) for size in range(1, heads + 1) if heads % size == 0)
    return (
        f"the context axis must divide the query heads of a device, and {heads=} is not divisible by context={axis_size}; "
        f"use context in {{{fitting}}}, or 'ring'"
    )


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def _repeated(x: Array, copies: int) -> Array:
    """Repeat each head of [batch, seq, heads, d] `copies` times; the cotangents of the copies are summed in
    float32."""
    return jnp.repeat(x, copies, axis=2) if copies > 1 else x


def _repeated_backward(copies: int, _, d_x: Array) -> tuple[Array]:
    if copies == 1:
        return (d_x,)
    grouped = d_x.reshape(*d_x.shape[:2], -1, copies, d_x.shape[3])
    return (grouped.astype(accumulation_dtype(d_x.dtype)).sum(axis=3).astype(d_x.dtype),)


_repeated.defvjp(lambda x, copies: (_repeated(x, copies), None), _repeated_backward)


def _to_rows(x: Array, axis: ContextAxis) -> Array:
    """Exchange [batch, local seq, heads, d] for [batch, seq, local heads, d]."""
    return _to_row_order(lax.all_to_all(x, axis.name, split_axis=2, concat_axis=1, tiled=True), axis)


def _to_heads(x: Array, axis: ContextAxis) -> Array:
    """Invert `_to_rows`; also its transpose, since both only move elements."""
    return lax.all_to_all(_to_device_order(x, axis), axis.name, split_axis=1, concat_axis=2, tiled=True)


_whole_rows = jax.custom_vjp(_to_rows, nondiff_argnums=(1,))
_whole_rows.defvjp(lambda x, axis: (_to_rows(x, axis), None), lambda axis, _, d_x: (_to_heads(d_x, axis),))
_whole_heads = jax.custom_vjp(_to_heads, nondiff_argnums=(1,))
_whole_heads.defvjp(lambda x, axis: (_to_heads(x, axis), None), lambda axis, _, d_x: (_to_rows(d_x, axis),))


def _to_row_order(x: Array, axis: ContextAxis) -> Array:
    """Restore rows, [batch, seq, ...], from the device order to their original order."""
    if axis.order == "contiguous":
        return x
    chunks = x.reshape(x.shape[0], axis.size, 2, -1, *x.shape[2:])
    return jnp.concatenate([chunks[:, :, 0], chunks[:, ::-1, 1]], axis=1).reshape(x.shape)


def _to_device_order(x: Array, axis: ContextAxis) -> Array:
    """Invert `_to_row_order`."""
    if axis.order == "contiguous":
        return x
    halves = x.reshape(x.shape[0], 2, axis.size, -1, *x.shape[2:])
    return jnp.stack([halves[:, 0], halves[:, 1, ::-1]], axis=2).reshape(x.shape)
