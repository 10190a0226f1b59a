"""Attention of new positions to a cache of keys and values, for generation."""

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from panax.core.layout.layout import current_target
from panax.kernels.attention.operands import ScoreRule
from panax.kernels.attention.sinks import add_sinks
from panax.kernels.product import MatmulCase
from panax.kernels.registry import Kernel, choose, log_choice, register


@dataclasses.dataclass(frozen=True)
class CachedKeys:
    """The cache of a layer, by heads, so that no product transposes it.

    Attributes:
        start: Position of the first query of each row. The cache holds the queries' own keys already.
        chunk: Queries attend to the keys of their own chunk of this many positions only; None for all earlier ones.
    """

    k: Float[Array, "batch kv_heads length head_dim"]
    v: Float[Array, "batch kv_heads length head_dim"]
    start: Int[Array, " batch"]
    chunk: int | None = None


def cached_attention(
    q: Float[Array, "batch seq heads head_dim"],
    cache: CachedKeys,
    scores: ScoreRule,
    sinks: Float[Array, " heads"] | None = None,
) -> Float[Array, "batch seq heads head_dim"]:
    """Compute causal attention of a row's queries to the positions of its cache up to their own; not differentiable.

    Args:
        sinks: See `attention`.
    """
    case = MatmulCase.of(q.size * cache.k.shape[2], q, cache.k, cache.v)
    target = current_target()
    kernel = log_choice(choose("cached attention", case, target), target).kernel
    # Only the form in plain XLA knows chunks.
    run = kernel.run if cache.chunk is None else _by_xla
    out, logsumexp = run(q, cache, scores, q.dtype if sinks is None else jnp.float32)
    return add_sinks(out, logsumexp, sinks)[0].astype(q.dtype)


def attended_mask(
    start: Int[Array, " batch"], seq: int, length: int, window: int | None, chunk: int | None = None
) -> Bool[Array, "batch seq length"]:
    """Return the mask of cached positions that each of a row's `seq` positions from its `start` on attends to."""
    place = start[:, None, None] + jnp.arange(seq)[None, :, None]
    distance = place - jnp.arange(length)[None, None, :]
    attended = (distance >= 0) & (distance < (window or length + 1))
    return attended if chunk is None else attended & (distance <= place % chunk)


def _by_xla(q: jax.Array, cache: CachedKeys, scores: ScoreRule, result_dtype: jnp.dtype) -> tuple[Array, Array]:
    """Compute all scores at once: a matrix-vector product bound by reading the cache."""
    batch, seq, heads, head_dim = q.shape
    kv_heads, length = cache.k.shape[1:3]
    grouped = q.reshape(batch, seq, kv_heads, heads // kv_heads, head_dim)
    score = jnp.einsum("bqhgd,bhkd->bhgqk", grouped, cache.k, preferred_element_type=jnp.float32) * scores.scale
    if scores.soft_cap is not None:
        score = scores.soft_cap * jnp.tanh(score / scores.soft_cap)
    attended = attended_mask(cache.start, seq, length, scores.mask.window, cache.chunk)
    score = jnp.where(attended[:, None, None], score, -jnp.inf)
    highest = score.max(axis=-1, keepdims=True)
    exponential = jnp.exp(score - highest)
    total = exponential.sum(axis=-1, keepdims=True)
    weights = (exponential / total).astype(q.dtype)
    out = jnp.einsum("bhgqk,bhkd->bqhgd", weights, cache.v, preferred_element_type=jnp.float32)
    logsumexp = (highest + jnp.log(total))[..., 0].transpose(0, 3, 1, 2)
    return out.astype(result_dtype).reshape(batch, seq, heads, head_dim), logsumexp.reshape(batch, seq, heads)


register(Kernel(work="cached attention", name="xla", run=_by_xla, rank=10))
