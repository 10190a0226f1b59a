"""Attention as one operation, forward and backward: scores are not kept between the two, only each query's normaliser.

Source: FlashAttention (arXiv:2205.14135), without its tiles. Differs: the scores of one pass are whole.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ....core import current_target
from ....kernels.attention_blockwise import Scores, flash_backward, flash_forward
from ....kernels.attention_layout import choose_blocks
from ....kernels.attention_mask import MaskRule
from ....kernels.cpu.attention import kernel_that_attends
from .registry import aten, lowers, wide


def _scores(q: Any, k: Any, causal: bool, mask: Any, scale: Any) -> Any:
    scores = jnp.einsum("bhqd,bhkd->bhqk", q, k, preferred_element_type=jnp.float32) * scale
    if mask is not None:
        scores = jnp.where(mask, scores, -jnp.inf) if mask.dtype == jnp.bool_ else scores + wide(mask)
    if causal:
        seen = np.tri(q.shape[2], k.shape[2], dtype=bool)
        scores = jnp.where(seen, scores, -jnp.inf)
    return scores


def _scale(q: Any, scale: Any) -> float:
    return q.shape[-1] ** -0.5 if scale is None else scale


@lowers(aten._scaled_dot_product_flash_attention_for_cpu)
def _attention(
    out: Any,
    q: Any,
    k: Any,
    v: Any,
    dropout: Any = 0.0,
    causal: bool = False,
    *,
    attn_mask: Any = None,
    scale: Any = None,
) -> Any:
    assert dropout == 0.0, "PyTorch takes another path where there is dropout"
    kernel = _kernel(q, k, v, causal, attn_mask, _scale(q, scale))
    if kernel is not None:
        found, normaliser = flash_forward(_by_position(q), _by_position(k), _by_position(v), None, None, **kernel)
        return _by_position(found), normaliser.swapaxes(1, 2)
    k, v = (_for_each_query_head(part, q) for part in (k, v))
    scores = _scores(q, k, causal, attn_mask, _scale(q, scale))
    normaliser = jax.nn.logsumexp(scores, axis=-1)
    # A query that sees nothing gets nothing.
    weights = jnp.exp(scores - jnp.where(jnp.isfinite(normaliser), normaliser, 0.0)[..., None])
    found = jnp.einsum("bhqk,bhkd->bhqd", weights.astype(v.dtype), v, preferred_element_type=jnp.float32)
    return found, normaliser


@lowers(aten._scaled_dot_product_flash_attention_for_cpu_backward)
def _attention_backward(
    out: Any, gradient: Any, q: Any, k: Any, v: Any, found: Any, normaliser: Any, dropout: Any, causal: bool, *,
    attn_mask: Any = None, scale: Any = None,
) -> Any:  # fmt: skip
    scale, kv_heads = _scale(q, scale), k.shape[1]
    kernel = _kernel(q, k, v, causal, attn_mask, scale)
    if kernel is not None:
        gradient, found = gradient.astype(q.dtype), found.astype(q.dtype)
        share = (wide(gradient) * wide(found)).sum(-1).swapaxes(1, 2)
        q, k, v, gradient = _by_position(q), _by_position(k), _by_position(v), _by_position(gradient)
        gradients = flash_backward(q, k, v, None, None, normaliser.swapaxes(1, 2), share, gradient, **kernel)
        return tuple(map(_by_position, gradients))
    k, v = (_for_each_query_head(part, q) for part in (k, v))
    scores = _scores(q, k, causal, attn_mask, scale)
    weights = jnp.exp(scores - jnp.where(jnp.isfinite(normaliser), normaliser, 0.0)[..., None])
    by_v = jnp.einsum("bhqk,bhqd->bhkd", weights.astype(v.dtype), gradient, preferred_element_type=jnp.float32)
    by_weights = jnp.einsum("bhqd,bhkd->bhqk", gradient, v, preferred_element_type=jnp.float32)
    share = (wide(gradient) * wide(found)).sum(-1, keepdims=True)
    by_scores = (weights * (by_weights - share) * scale).astype(q.dtype)
    by_q = jnp.einsum("bhqk,bhkd->bhqd", by_scores, k, preferred_element_type=jnp.float32)
    by_k = jnp.einsum("bhqk,bhqd->bhkd", by_scores, q, preferred_element_type=jnp.float32)
    return by_q, _of_own_heads(by_k, kv_heads), _of_own_heads(by_v, kv_heads)


def _kernel(q: Any, k: Any, v: Any, causal: bool, mask: Any, scale: float) -> dict[str, Any] | None:
    """What the kernels for CPU are told, where they can do this."""
    if mask is not None or current_target().platform != "cpu":
        return None
    (batch, heads, query_seq, _), (_, kv_heads, key_seq, _) = q.shape, k.shape
    blocks = choose_blocks(
        target=current_target(), batch=batch, kv_heads=kv_heads, group=heads // kv_heads, query_seq=query_seq, key_seq=key_seq,
        window=None, block_size=None,
    )  # fmt: skip
    if kernel_that_attends(blocks, *map(_by_position, (q, k, v))) is None:
        return None
    return {"scores": Scores(mask=MaskRule(causal=causal, window=None), scale=scale, soft_cap=None), "blocks": blocks}


def _by_position(x: Any) -> Any:
    """[batch, heads, seq, head_dim] to [batch, seq, heads, head_dim], and back."""
    return x.swapaxes(1, 2)


def _for_each_query_head(kv: Any, q: Any) -> Any:
    return kv if kv.shape[1] == q.shape[1] else jnp.repeat(kv, q.shape[1] // kv.shape[1], axis=1)


def _of_own_heads(gradient: Any, kv_heads: int) -> Any:
    batch, heads, *rest = gradient.shape
    return gradient if heads == kv_heads else gradient.reshape(batch, kv_heads, heads // kv_heads, *rest).sum(2)
