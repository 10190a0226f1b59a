"""Attention as one operation, forward and backward: scores are not stored between the two, only each query's
normalizer.

Source: FlashAttention (arXiv:2205.14135). Differs: without a faster kernel for the target, the scores of one
pass are computed at once.
"""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from ....core import Target, current_target
from ....kernels.attention.blockwise import AttentionPasses
from ....kernels.attention.layout import choose_blocks
from ....kernels.attention.mask import MaskRule
from ....kernels.attention.operands import AttentionOperands, OutputGradient, ScoreRule
from ....kernels.product import MatmulCase, choose_timed
from ....kernels.registry import Kernel, list_kernels, log_choice, register
from .registry import aten, register_lowering, upcast


@dataclasses.dataclass(frozen=True)
class AdaptedCase:
    """Properties by which a kernel is chosen.

    Attributes:
        masked: True if an array is given as the attention mask.
    """

    matmul: MatmulCase
    masked: bool


class SavedAttention(NamedTuple):
    """Results of a forward pass that its backward pass reads, as PyTorch saves them."""

    q: Any
    k: Any
    v: Any
    output: Any
    normalizer: Any


def _halves(q: Any, k: Any, v: Any, mask: Any) -> AttentionPasses:
    batch, heads, query_seq, head_dim = q.shape
    matmul = MatmulCase.of(batch * heads * query_seq * k.shape[2] * head_dim, q, k, v)
    case, target = AdaptedCase(matmul, mask is not None), current_target()
    return log_choice(choose_timed("adapted attention", case, matmul.dtype, target), target).kernel.run


@register_lowering(aten._scaled_dot_product_flash_attention_for_cpu)
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
    assert dropout == 0.0, "PyTorch takes another path with dropout"
    return _halves(q, k, v, attn_mask).forward(q, k, v, causal, attn_mask, _scale(q, scale))


@register_lowering(aten._scaled_dot_product_flash_attention_for_cpu_backward)
def _attention_backward(
    out: Any, gradient: Any, q: Any, k: Any, v: Any, output: Any, normalizer: Any, dropout: Any, causal: bool, *,
    attn_mask: Any = None, scale: Any = None,
) -> Any:  # fmt: skip
    backward = _halves(q, k, v, attn_mask).backward
    return backward(gradient, SavedAttention(q, k, v, output, normalizer), causal, attn_mask, _scale(q, scale))


def _scale(q: Any, scale: Any) -> float:
    return q.shape[-1] ** -0.5 if scale is None else scale


def _whole_scores(q: Any, k: Any, causal: bool, mask: Any, scale: float) -> Any:
    scores = jnp.einsum("bhqd,bhkd->bhqk", q, k, preferred_element_type=jnp.float32) * scale
    if mask is not None:
        scores = jnp.where(mask, scores, -jnp.inf) if mask.dtype == jnp.bool_ else scores + upcast(mask)
    if causal:
        seen = np.tri(q.shape[2], k.shape[2], dtype=bool)
        scores = jnp.where(seen, scores, -jnp.inf)
    return scores


def _weights(scores: Any, normalizer: Any) -> Any:
    """Compute attention weights from scores; the weights of a query with all keys masked are zero."""
    return jnp.exp(scores - jnp.where(jnp.isfinite(normalizer), normalizer, 0.0)[..., None])


def _whole_forward(q: Any, k: Any, v: Any, causal: bool, mask: Any, scale: float) -> Any:
    k, v = (_for_each_query_head(part, q) for part in (k, v))
    scores = _whole_scores(q, k, causal, mask, scale)
    normalizer = jax.nn.logsumexp(scores, axis=-1)
    weights = _weights(scores, normalizer).astype(v.dtype)
    return jnp.einsum("bhqk,bhkd->bhqd", weights, v, preferred_element_type=jnp.float32), normalizer


def _whole_backward(gradient: Any, saved: SavedAttention, causal: bool, mask: Any, scale: float) -> Any:
    q, k, v, output, normalizer = saved
    kv_heads = k.shape[1]
    k, v = (_for_each_query_head(part, q) for part in (k, v))
    weights = _weights(_whole_scores(q, k, causal, mask, scale), normalizer)
    by_v = jnp.einsum("bhqk,bhqd->bhkd", weights.astype(v.dtype), gradient, preferred_element_type=jnp.float32)
    by_weights = jnp.einsum("bhqd,bhkd->bhqk", gradient, v, preferred_element_type=jnp.float32)
    share = (upcast(gradient) * upcast(output)).sum(-1, keepdims=True)
    by_scores = (weights * (by_weights - share) * scale).astype(q.dtype)
    by_q = jnp.einsum("bhqk,bhkd->bhqd", by_scores, k, preferred_element_type=jnp.float32)
    by_k = jnp.einsum("bhqk,bhqd->bhkd", by_scores, q, preferred_element_type=jnp.float32)
    return by_q, _of_own_heads(by_k, kv_heads), _of_own_heads(by_v, kv_heads)


def _partial_forward(kernel: Kernel, q: Any, k: Any, v: Any, causal: bool, mask: None, scale: float) -> Any:
    q, k, v = map(_by_position, (q, k, v))
    output, normalizer = kernel.run.forward(AttentionOperands(q, k, v), **_static(q, k, causal, scale))
    return _by_position(output), normalizer.swapaxes(1, 2)


def _partial_backward(
    kernel: Kernel, gradient: Any, saved: SavedAttention, causal: bool, mask: None, scale: float
) -> Any:
    q, k, v, output, normalizer = saved
    gradient, output = gradient.astype(q.dtype), output.astype(q.dtype)
    share = (upcast(gradient) * upcast(output)).sum(-1).swapaxes(1, 2)
    q, k, v, gradient = map(_by_position, (q, k, v, gradient))
    gradients = kernel.run.backward(
        AttentionOperands(q, k, v),
        OutputGradient(normalizer.swapaxes(1, 2), share, gradient),
        **_static(q, k, causal, scale),
    )
    return tuple(map(_by_position, gradients))


def _static(q: Any, k: Any, causal: bool, scale: float) -> dict[str, Any]:
    blocks = choose_blocks(q, k, window=None, target=current_target())
    scores = ScoreRule(mask=MaskRule(causal=causal, window=None), scale=scale, soft_cap=None)
    return {"scores": scores, "blocks": blocks, "result_dtype": q.dtype}


def _by_position(x: Any) -> Any:
    """Transpose [batch, heads, seq, head_dim] to [batch, seq, heads, head_dim], and back."""
    return x.swapaxes(1, 2)


def _for_each_query_head(kv: Any, q: Any) -> Any:
    return kv if kv.shape[1] == q.shape[1] else jnp.repeat(kv, q.shape[1] // kv.shape[1], axis=1)


def _of_own_heads(gradient: Any, kv_heads: int) -> Any:
    batch, heads, *rest = gradient.shape
    return gradient if heads == kv_heads else gradient.reshape(batch, kv_heads, heads // kv_heads, *rest).sum(2)


def _limit(kernel: Kernel, case: AdaptedCase, target: Target) -> str | None:
    return "it takes no array as a mask" if case.masked else kernel.limit(case.matmul, target)


register(
    Kernel(work="adapted attention", name="whole scores", run=AttentionPasses(_whole_forward, _whole_backward), rank=10)
)
for _kernel in list_kernels("partial attention"):
    if _kernel.platforms:
        _parts = AttentionPasses(
            functools.partial(_partial_forward, _kernel), functools.partial(_partial_backward, _kernel)
        )
        register(
            dataclasses.replace(_kernel, work="adapted attention", run=_parts, limit=functools.partial(_limit, _kernel))
        )
