"""Scan of a state-space model by definition: one position at a time, in float32. Ground truth for the chunked
scan."""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from panax.kernels.precision import accumulation_dtype
from panax.kernels.state_space.state_space import ScanInputs, ScanResult


def reference_state_space_scan(
    inputs: ScanInputs,
    *,
    state: Float[Array, "batch heads head_dim state"] | None = None,
    segments: Int[Array, "batch seq"] | None = None,
) -> ScanResult:
    """Compute `state_space_scan`; its backward pass stores the state of every position.

    Source: Transformers are SSMs (arXiv:2405.21060), equation 2 with the discretization of Mamba-2.
    """
    x, dt, a, b, c = inputs
    batch, seq, heads, head_dim = x.shape
    each = heads // b.shape[2]
    wide = accumulation_dtype(x.dtype)
    segments = jnp.ones((batch, seq), jnp.int32) if segments is None else segments
    # A document's first position resets the state; the row's first position belongs to the given state.
    before = jnp.concatenate([segments[:, :1], segments[:, :-1]], axis=1)
    keeps, real = (segments == before) & (segments != 0), segments != 0

    def step(carry, position):
        state, decay = carry
        x, dt, b, c, keep, real = position
        left = jnp.where(keep[:, None], jnp.exp(dt * a.astype(wide)[None]), 0.0)
        write = jnp.where(real[:, None], dt, 0.0)
        b, c = (jnp.repeat(part, each, axis=1) for part in (b, c))
        state = left[..., None, None] * state + (write[..., None] * x)[..., None] * b[:, :, None, :]
        return (state, left * decay), jnp.where(real[:, None, None], (state * c[:, :, None, :]).sum(axis=-1), 0.0)

    if state is None:
        state = jnp.zeros((batch, heads, head_dim, b.shape[-1]), wide)
    positions = [jnp.moveaxis(part.astype(wide), 1, 0) for part in (x, dt, b, c)]
    start = (state.astype(wide), jnp.ones((batch, heads), wide))
    (state, decay), y = lax.scan(step, start, (*positions, keeps.T, real.T))
    return ScanResult(jnp.moveaxis(y, 0, 1).astype(x.dtype), state, decay)
