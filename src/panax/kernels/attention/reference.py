"""Reference attention: the full score matrix with a float32 softmax, as ground truth for faster kernels."""

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from panax.kernels.attention.operands import ScoreRule
from panax.kernels.precision import accumulation_dtype


def reference_attention(
    q: Float[Array, "batch query_seq heads head_dim"],
    k: Float[Array, "batch key_seq kv_heads head_dim"],
    v: Float[Array, "batch key_seq kv_heads head_dim"],
    segments: Int[Array, "batch seq"] | None,
    *,
    scores: ScoreRule,
    sinks: Float[Array, " heads"] | None = None,
) -> Float[Array, "batch query_seq heads head_dim"]:
    """Compute softmax attention with grouped queries; memory is quadratic in the length.

    Source: Attention Is All You Need (arXiv:1706.03762), section 3.2.1; grouped queries: arXiv:2305.13245;
    soft-cap: Gemma 2 (arXiv:2408.00118), section 2. A query without visible keys outputs zeros.
    """
    batch, query_seq, heads, head_dim = q.shape
    key_seq, kv_heads = k.shape[1:3]
    wide = accumulation_dtype(q.dtype)
    grouped = q.reshape(batch, query_seq, kv_heads, heads // kv_heads, head_dim)
    # b batch, q query, k key, g key-value head, r query head of the group, d head_dim
    score = scores.scale * jnp.einsum("bqgrd,bkgd->bgrqk", grouped, k, preferred_element_type=wide)
    if scores.soft_cap is not None:
        score = scores.soft_cap * jnp.tanh(score / scores.soft_cap)

    visible = scores.mask.allows(jnp.arange(query_seq)[:, None], jnp.arange(key_seq)[None, :])[None, None, None]
    if segments is not None:
        together = (segments[:, :, None] == segments[:, None, :]) & (segments[:, :, None] != 0)
        visible = visible & together[:, None, None]

    # A row without keys would be 0/0: a maximum of 0 and a sum of 1 yield zeros, also in gradients.
    score = jnp.where(visible, score, -jnp.inf)
    highest = score.max(axis=-1, keepdims=True)
    extra = None if sinks is None else sinks.astype(wide).reshape(1, kv_heads, -1, 1, 1)
    highest = highest if extra is None else jnp.maximum(highest, extra)
    highest = jnp.where(jnp.isfinite(highest), highest, 0.0)
    weights = jnp.exp(score - highest)
    total = weights.sum(axis=-1, keepdims=True)
    total = total if extra is None else total + jnp.exp(extra - highest)
    weights = (weights / jnp.where(total == 0, 1.0, total)).astype(q.dtype)
    out = jnp.einsum("bgrqk,bkgd->bqgrd", weights, v, preferred_element_type=wide)
    return out.reshape(q.shape).astype(q.dtype)
