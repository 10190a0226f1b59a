"""Depthwise causal convolution with few taps along the sequence."""

import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from panax.kernels.precision import accumulation_dtype


@functools.partial(jax.checkpoint, prevent_cse=False)
def causal_convolution(
    x: Float[Array, "batch seq *channel"],
    w: Float[Array, "*channel tap"],
    before: Float[Array, "batch tail *channel"] | None = None,
    segments: Int[Array, "batch seq"] | None = None,
    segments_before: Int[Array, "batch tail"] | None = None,
) -> Float[Array, "batch seq *channel"]:
    """Compute `y[t] = w[-1] x[t] + w[-2] x[t - 1] + ...`, summed in float32, within documents; the backward
    pass only stores x.

    A sum of shifted arrays: XLA on CPU differentiates a convolution with one channel per group much more
    slowly.

    Args:
        w: Weights; the last tap is multiplied with the position itself.
        before: The positions before the first one, one fewer than taps; None: zeros.
        segments: Document id of each position; 0 is padding. `segments_before`: those of the positions in
            `before`; None: padding.

    >>> x, w = jnp.arange(1.0, 5.0).reshape(1, 4, 1), jnp.array([[10.0, 1.0]])
    >>> causal_convolution(x, w).ravel().tolist()
    [1.0, 12.0, 23.0, 34.0]
    >>> causal_convolution(x, w, segments=jnp.array([[1, 1, 2, 2]])).ravel().tolist()
    [1.0, 12.0, 3.0, 34.0]
    """
    seq, tail = x.shape[1], w.shape[-1] - 1
    wide = accumulation_dtype(x.dtype)
    if before is None:
        before = jnp.zeros((x.shape[0], tail, *x.shape[2:]), x.dtype)
    longer = jnp.concatenate([before, x], axis=1)
    runs = None
    if segments is not None:
        ahead = jnp.zeros((x.shape[0], tail), segments.dtype) if segments_before is None else segments_before
        of_all = jnp.concatenate([ahead, segments], axis=1)
        changes = jnp.pad(of_all[:, 1:] != of_all[:, :-1], ((0, 0), (1, 0)))
        # Padding is not a document: its run ids are all 0, which no run has.
        runs = jnp.where(of_all != 0, jnp.cumsum(changes, axis=1, dtype=jnp.int32) + 1, 0)
    total = jnp.zeros(x.shape, wide)
    for tap in range(tail + 1):
        shifted = longer[:, tap : tap + seq].astype(wide) * w[..., tap].astype(wide)[None, None]
        if runs is not None:
            own_run, tap_run = runs[:, tail:], runs[:, tap : tap + seq]
            same_document = ((own_run == tap_run) & (own_run != 0)).reshape(*own_run.shape, *(1,) * (x.ndim - 2))
            shifted = jnp.where(same_document, shifted, 0.0)
        total = total + shifted
    return total.astype(x.dtype)
