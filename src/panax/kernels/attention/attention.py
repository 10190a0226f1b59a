"""Attention: one function, with a kernel chosen by the target and the static case."""

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
from jaxtyping import Array, Float, Int

from panax.core.layout.target import Target
from panax.kernels.attention.blockwise import blockwise_attention
from panax.kernels.attention.case import AttentionCase, cudnn_limit, cudnn_missing, mosaic_limit, triton_limit
from panax.kernels.attention.gpu import gpu_attention
from panax.kernels.attention.layout import choose_blocks
from panax.kernels.attention.mask import MaskRule
from panax.kernels.attention.operands import ScoreRule
from panax.kernels.attention.reference import reference_attention
from panax.kernels.attention.tpu import tpu_attention
from panax.kernels.registry import Kernel, choose, log_choice, register
from panax.kernels.varying_axes import vary_alike


class AttentionOptions(NamedTuple):
    """The arguments by which a layer's attention differs from plain causal attention, as in `attention`."""

    causal: bool = True
    window: int | None = None
    soft_cap: float | None = None
    scale: float | None = None
    sinks: Float[Array, " heads"] | None = None


def attention(
    q: Float[Array, "batch query_seq heads head_dim"],
    k: Float[Array, "batch key_seq kv_heads head_dim"],
    v: Float[Array, "batch key_seq kv_heads head_dim"],
    *,
    segments: Int[Array, "batch seq"] | None = None,
    causal: bool = True,
    window: int | None = None,
    soft_cap: float | None = None,
    scale: float | None = None,
    sinks: Float[Array, " heads"] | None = None,
    target: Target,
    implementation: str = "auto",
    block_size: int | None = None,
) -> Float[Array, "batch query_seq heads head_dim"]:
    """Compute softmax attention of local arrays; differentiable with respect to q, k, v and
    the sinks.

    Positions count from the start of both sequences. Matmuls are computed in the arrays' dtype, sums and the
    softmax in float32.

    Args:
        segments: Ids of documents packed into a row: a query attends only within its segment. 0 is padding:
            such a query outputs zeros, and its gradients are zeros. Requires equal query and key lengths.
        causal: If True, a query at `i` attends to keys at `j <= i`.
        window: Sliding window. Causal: a query attends to the last `window` keys, including its own position.
            Otherwise: to keys at a distance of at most `window` on either side. (As `sliding_window` in
                Hugging Face's models.)
        soft_cap: Bounds scaled scores to (-soft_cap, soft_cap) by `soft_cap * tanh(score / soft_cap)`, before
            the mask.
        scale: Factor of the scores; by default 1 / sqrt(head_dim).
        sinks: A score for each head that takes part in the softmax of every query without a value, so that
            weights sum to less than 1 (gpt-oss).
        target: Hardware for which the program is compiled, not the attached hardware.
        implementation: A kernel's name; "auto" selects the recipe's choice, else the fastest that supports
            the case.
        block_size: Queries and keys per block, for "blockwise" only.

    Raises:
        ValueError: The shapes don't match, or the requested implementation does not support the case; the
            message names the limit.
    """
    mask = MaskRule(causal=causal, window=window)
    case = _case(q, k, v, segments, mask, soft_cap, sinks)
    choice = log_choice(choose("attention", case, target, named=implementation), target)
    scale = 1.0 / math.sqrt(q.shape[-1]) if scale is None else scale
    options: dict[str, Any] = {"scores": ScoreRule(mask=mask, scale=scale, soft_cap=soft_cap), "target": target}
    if sinks is not None:
        # Kernels of users that lack the argument keep working for all other models.
        options["sinks"] = sinks
    if block_size is not None:
        if choice.name != "blockwise":
            raise ValueError(
                f"block_size={block_size} has no effect on {choice.name!r}; use implementation='blockwise'"
            )
        options["block_size"] = block_size
    return choice.kernel.run(q, k, v, segments, **options)


def _case(
    q: Array,
    k: Array,
    v: Array,
    segments: Array | None,
    mask: MaskRule,
    soft_cap: float | None,
    sinks: Array | None,
) -> AttentionCase:
    """Check the shapes and return the static case."""
    batch, query_seq, heads, head_dim = q.shape
    key_seq, kv_heads = k.shape[1:3]
    if k.shape != v.shape or k.shape[0] != batch or k.shape[3] != head_dim:
        raise ValueError(f"q {q.shape}, k {k.shape} and v {v.shape} don't fit: k and v need batch={batch}, {head_dim=}")
    if heads % kv_heads:
        raise ValueError(f"{heads=} must be a multiple of {kv_heads=}")
    if not q.dtype == k.dtype == v.dtype:
        raise ValueError(f"q, k and v must have one dtype, not {q.dtype}, {k.dtype} and {v.dtype}")
    if segments is not None and not query_seq == key_seq == segments.shape[1]:
        raise ValueError(f"segments need one length for all, not {query_seq=}, {key_seq=}, segments {segments.shape}")
    if soft_cap is not None and soft_cap <= 0:
        raise ValueError(f"{soft_cap=} must be positive, or None for no cap")
    if sinks is not None and sinks.shape != (heads,):
        raise ValueError(f"sinks {sinks.shape} must have one score for each of the {heads} heads")
    return AttentionCase(
        batch=batch,
        query_seq=query_seq,
        key_seq=key_seq,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        dtype=str(q.dtype),
        causal=mask.causal,
        window=mask.window,
        soft_cap=soft_cap,
        packed=segments is not None,
        sinks=sinks is not None,
    )


def _cudnn(q: Array, k: Array, v: Array, segments: None, *, scores: ScoreRule, target: Target) -> Array:
    q, k, v, _ = vary_alike(q, k, v, None)
    mask = scores.mask
    # In cuDNN's form: (left, right) distances from the query.
    reach = None if mask.window is None else (mask.window - 1, 0)
    return jax.nn.dot_product_attention(
        q, k, v, scale=scores.scale, is_causal=mask.causal, local_window_size=reach, implementation="cudnn"
    )


def _blockwise(
    q: Array,
    k: Array,
    v: Array,
    segments: Array | None,
    *,
    scores: ScoreRule,
    target: Target,
    block_size: int | None = None,
    **sinks: Array,
) -> Array:
    blocks = choose_blocks(q, k, window=scores.mask.window, target=target, block_size=block_size)
    return blockwise_attention(q, k, v, segments, scores=scores, blocks=blocks, **sinks)


def _whatever_the_target(run: Callable[..., Array]) -> Callable[..., Array]:
    return lambda q, k, v, segments, *, target, **options: run(q, k, v, segments, **options)


_kernel = functools.partial(Kernel, work="attention")

register(_kernel(name="cudnn", run=_cudnn, rank=30, limit=cudnn_limit, missing=cudnn_missing, platforms=("gpu",)))
register(
    _kernel(name="pallas", run=_whatever_the_target(gpu_attention), rank=20, limit=triton_limit, platforms=("gpu",))
)
register(
    _kernel(name="pallas", run=_whatever_the_target(tpu_attention), platforms=("tpu",), rank=20, limit=mosaic_limit)
)
register(_kernel(name="blockwise", run=_blockwise, rank=10))
register(_kernel(name="reference", run=_whatever_the_target(reference_attention)))
