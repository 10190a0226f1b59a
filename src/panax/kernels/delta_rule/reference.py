"""The gated delta rule by definition: one position at a time. Ground truth for the chunked version."""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from panax.kernels.delta_rule.delta_rule import DeltaInputs, DeltaResult
from panax.kernels.precision import accumulation_dtype


def reference_delta_rule(
    inputs: DeltaInputs,
    *,
    state: Float[Array, "batch heads key_dim value_dim"] | None = None,
    segments: Int[Array, "batch seq"] | None = None,
) -> DeltaResult:
    """Compute `delta_rule` in float32, or in float64 if v is; its backward pass stores the state of every position.

    Source: Gated Delta Networks (arXiv:2412.06464), equation 10.
    """
    q, k, v, log_decay, beta = inputs
    batch, seq, heads, value_dim = v.shape
    each = heads // k.shape[2]
    wide = accumulation_dtype(v.dtype)
    segments = jnp.ones((batch, seq), jnp.int32) if segments is None else segments
    # A document's first position resets the state; the row's first position belongs to the given state.
    before = jnp.concatenate([segments[:, :1], segments[:, :-1]], axis=1)
    keeps, real = (segments == before) & (segments != 0), segments != 0

    def step(state: Array, position: tuple[Array, ...]) -> tuple[Array, Array]:
        q, k, v, log_decay, beta, keep, real = position
        q, k = (jnp.repeat(part, each, axis=1) for part in (q, k))
        state = jnp.where(keep[:, None], jnp.exp(log_decay), 0.0)[..., None, None] * state
        known = (state * k[..., None]).sum(axis=-2)
        correction = jnp.where(real[:, None], beta, 0.0)[..., None] * (v - known)
        state = state + k[..., None] * correction[..., None, :]
        return state, jnp.where(real[:, None, None], (state * q[..., None]).sum(axis=-2), 0.0)

    if state is None:
        state = jnp.zeros((batch, heads, k.shape[-1], value_dim), wide)
    positions = [jnp.moveaxis(part.astype(wide), 1, 0) for part in (q, k, v, log_decay, beta)]
    state, y = lax.scan(step, state.astype(wide), (*positions, keeps.T, real.T))
    return DeltaResult(jnp.moveaxis(y, 0, 1).astype(v.dtype), state)
