"""Flash attention in plain JAX: exact, memory linear in the length, on every backend.

The score matrix is visited block by block. The list of (query block, key block) pairs with a visible key is
static (`MaskRule.block_pairs`); one `lax.scan` walks it and updates accumulators in place. Causal attention
therefore costs half, and a window costs time linear in the length. If everything fits one block there is no
scan. Nothing of the score matrix is stored for the backward pass, which recomputes each block from (q, k, v,
logsumexp).

Source: FlashAttention (arXiv:2205.14135), FlashAttention-2 (arXiv:2307.08691). Differences: the loop is over
a static list of pairs; keys and values of grouped queries are never repeated (the queries of a group are rows
of one matmul).

On the CPU two things determine the speed, both measured. Every matmul is written as rows-by-columns, `[m, k]
x [k, n]`, with the transposed copies of q, k, v made once outside the loop: XLA:CPU runs other contractions
up to 10 times slower. And a block of scores must fit in the cache: about 512 x 512, for a few heads at a
time, so there an outer loop walks the (batch, key-value head) rows.
"""

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from panax.kernels.attention.layout import (
    ScoreBlocks,
    ScoreLayout,
    cut_scores,
    from_key_blocks_t,
    from_query_blocks,
    key_blocks,
    query_blocks,
    segment_blocks,
)
from panax.kernels.attention.mask import MASKED, MIN_MAXIMUM, MaskRule
from panax.kernels.attention.operands import AttentionOperands, OutputGradient, ScoreRule
from panax.kernels.attention.sinks import add_sinks, sink_gradient
from panax.kernels.precision import accumulation_dtype
from panax.kernels.product import MatmulCase, choose_timed
from panax.kernels.registry import Kernel, log_choice, register
from panax.kernels.varying_axes import vary_alike, vary_like


class AttentionPasses(NamedTuple):
    """Functions of a kernel for "partial attention".

    Attributes:
        forward: Called with all arguments of `flash_forward`.
        backward: Called with all arguments of `flash_backward`.
    """

    forward: Callable[..., tuple[Array, Array]]
    backward: Callable[..., tuple[Array, Array, Array]]


def partial_kernel(blocks: ScoreBlocks, q: Array, k: Array, *others: Array) -> Kernel:
    """Return the kernel for attention in pieces that are combined afterwards, with a separate backward
    pass."""
    batch, query_seq, heads, head_dim = q.shape
    case = MatmulCase.of(batch * heads * query_seq * k.shape[1] * head_dim, q, k, *others)
    return log_choice(choose_timed("partial attention", case, case.dtype, blocks.target), blocks.target).kernel


def blockwise_attention(
    q: Float[Array, "batch query_seq heads head_dim"],
    k: Float[Array, "batch key_seq kv_heads head_dim"],
    v: Float[Array, "batch key_seq kv_heads head_dim"],
    segments: Int[Array, "batch seq"] | None,
    *,
    scores: ScoreRule,
    blocks: ScoreBlocks,
    sinks: Float[Array, " heads"] | None = None,
) -> Float[Array, "batch query_seq heads head_dim"]:
    """Compute exact attention; stores (q, k, v, out, logsumexp) for its backward pass. Arrays as in
    `attention`."""
    q, k, v, segments = vary_alike(q, k, v, segments)
    sinks = None if sinks is None else vary_like(sinks, q)
    return _attention(q, k, v, segments, sinks, scores, blocks)


@functools.partial(jax.custom_vjp, nondiff_argnums=(5, 6))
def _attention(
    q: Array,
    k: Array,
    v: Array,
    segments: Array | None,
    sinks: Array | None,
    scores: ScoreRule,
    blocks: ScoreBlocks,
) -> Array:
    return _attention_forward(q, k, v, segments, sinks, scores, blocks)[0]


def _attention_forward(q, k, v, segments, sinks, scores, blocks):
    wide = None if sinks is None else accumulation_dtype(q.dtype)
    operands = AttentionOperands(q, k, v, segments, segments)
    out, logsumexp = flash_forward(operands, scores=scores, blocks=blocks, result_dtype=wide)
    out, logsumexp = add_sinks(out, logsumexp, sinks)
    out = out.astype(q.dtype)
    return out, (q, k, v, segments, sinks, out, logsumexp)


def _attention_backward(scores, blocks, saved, d_out):
    q, k, v, segments, sinks, out, logsumexp = saved
    operands, delta = AttentionOperands(q, k, v, segments, segments), output_delta(out, d_out)
    gradients = flash_backward(operands, OutputGradient(logsumexp, delta, d_out), scores=scores, blocks=blocks)
    return *gradients, None, sink_gradient(sinks, logsumexp, delta)


_attention.defvjp(_attention_forward, _attention_backward)


def output_delta(
    out: Float[Array, "batch query_seq heads head_dim"], d_out: Float[Array, "batch query_seq heads head_dim"]
) -> Float[Array, "batch query_seq heads"]:
    """Return the inner product of each output with its cotangent, which the derivative of the softmax
    subtracts."""
    wide = accumulation_dtype(out.dtype)
    return (out.astype(wide) * d_out.astype(wide)).sum(axis=-1)


def flash_forward(
    operands: AttentionOperands,
    *,
    scores: ScoreRule,
    blocks: ScoreBlocks,
    result_dtype: DTypeLike | None = None,
) -> tuple[Float[Array, "batch query_seq heads head_dim"], Float[Array, "batch query_seq heads"]]:
    """Compute the output and the logarithm of each query's softmax sum, which is -1e30 if a query sees no
    key.

    Not differentiable by itself; the pieces of a sequence split over devices are combined by their logsumexp.

    Args:
        result_dtype: Dtype of the output; by default that of q. Use float32 for a piece that will be combined
            with others.
    """
    q, k, v = operands[:3]
    run = partial_kernel(blocks, q, k, v).run.forward
    return run(operands, scores=scores, blocks=blocks, result_dtype=result_dtype or q.dtype)


def _forward(operands: AttentionOperands, *, scores: ScoreRule, blocks: ScoreBlocks, result_dtype: DTypeLike):
    """Compute `flash_forward` by a scan over pairs of blocks."""
    q, k = operands[:2]
    cut = cut_scores(q, k, blocks)
    pairs = scores.mask.block_pairs(cut.q, cut.k, blocks.query, blocks.key)
    wide = accumulation_dtype(q.dtype)
    product = functools.partial(jnp.einsum, "nab,nbc->nac", preferred_element_type=wide)

    def attend(operands):
        q, k, v, query_segments, key_segments = operands
        queries, keys_t, values = query_blocks(q, cut), key_blocks(k, cut, transpose=True), key_blocks(v, cut)
        query_segment = segment_blocks(query_segments, cut.query_blocks, blocks.query, cut)
        key_segment = segment_blocks(key_segments, cut.key_blocks, blocks.key, cut)

        def step(carry, pair):
            i, j = pair[0], pair[1]
            total, highest, out = (_at(part, i) for part in carry)
            raw = product(_at(queries, i), _at(keys_t, j))
            visible = _visible(scores.mask, cut, i, j, query_segment, key_segment)
            score = _score(raw, scores)[0]
            score = score if visible is None else jnp.where(visible, score, MASKED)
            highest_now = jnp.maximum(highest, score.max(axis=-1))
            # The barrier prevents XLA from computing the exponential twice, once for the sum and once for the
            # matmul.
            weight = lax.optimization_barrier(jnp.exp(score - highest_now[..., None]))
            shrink = jnp.exp(highest - highest_now)
            total = total * shrink + weight.sum(axis=-1)
            out = out * shrink[..., None] + product(weight.astype(q.dtype), _at(values, j))
            return tuple(_put(part, new, i) for part, new in zip(carry, (total, highest_now, out))), None

        start = (
            jnp.zeros(queries.shape[:-1], wide),
            jnp.full(queries.shape[:-1], MIN_MAXIMUM, wide),
            jnp.zeros(queries.shape, wide),
        )
        total, highest, out = _walk(step, tuple(vary_like(part, queries) for part in start), pairs)
        any_visible = total > 0
        total = jnp.where(any_visible, total, 1.0)
        logsumexp = jnp.where(any_visible, highest + jnp.log(total), MASKED)
        out = (out / total[..., None]).astype(result_dtype)
        return from_query_blocks(out, cut), from_query_blocks(logsumexp[..., None], cut)[..., 0]

    outputs = (jnp.zeros(q.shape, result_dtype), jnp.zeros(q.shape[:-1], wide))
    out, logsumexp = _over_rows(attend, operands, outputs, cut)
    return out, logsumexp


def flash_backward(
    operands: AttentionOperands,
    output: OutputGradient,
    *,
    scores: ScoreRule,
    blocks: ScoreBlocks,
    result_dtype: DTypeLike | None = None,
) -> tuple[Array, Array, Array]:
    """Compute the cotangents of q, k and v in one pass over the block pairs.

    Args:
        output: The logsumexp from `flash_forward`, and the delta; both of the full sequence if these are the
            keys of one piece.
        result_dtype: Dtype of the cotangents; by default those of q, k and v. Use float32 for a piece that
            will be added to others.
    """
    q, k, v = operands[:3]
    run = partial_kernel(blocks, q, k, v, output.d_out).run.backward
    return run(operands, output, scores=scores, blocks=blocks, result_dtype=result_dtype or q.dtype)


def _backward(
    operands: AttentionOperands,
    output: OutputGradient,
    *,
    scores: ScoreRule,
    blocks: ScoreBlocks,
    result_dtype: DTypeLike,
):
    """Compute `flash_backward` by a scan over pairs of blocks."""
    q, k, v, query_segments, key_segments = operands
    cut = cut_scores(q, k, blocks)
    pairs = scores.mask.block_pairs(cut.q, cut.k, blocks.query, blocks.key)
    wide = accumulation_dtype(q.dtype)
    product = functools.partial(jnp.einsum, "nab,nbc->nac", preferred_element_type=wide)

    def attend(arrays):
        q, k, v, d_out, logsumexp, delta, query_segments, key_segments = arrays
        queries, queries_t = query_blocks(q, cut), query_blocks(q, cut, transpose=True)
        keys, keys_t, values_t = key_blocks(k, cut), key_blocks(k, cut, transpose=True), key_blocks(v, cut, True)
        d_outs, d_outs_t = query_blocks(d_out, cut), query_blocks(d_out, cut, transpose=True)
        sums = query_blocks(logsumexp[..., None], cut)[..., 0]
        deltas = query_blocks(delta[..., None], cut)[..., 0]
        query_segment = segment_blocks(query_segments, cut.query_blocks, blocks.query, cut)
        key_segment = segment_blocks(key_segments, cut.key_blocks, blocks.key, cut)

        def step(carry, pair):
            i, j = pair[0], pair[1]
            raw = product(_at(queries, i), _at(keys_t, j))
            visible = _visible(scores.mask, cut, i, j, query_segment, key_segment)
            score, slope = _score(raw, scores)
            weight = jnp.exp(score - _at(sums, i)[..., None])
            weight = weight if visible is None else jnp.where(visible, weight, 0.0)
            weight = lax.optimization_barrier(weight)
            d_weight = product(_at(d_outs, i), _at(values_t, j))
            d_raw = weight * (d_weight - _at(deltas, i)[..., None]) * slope
            d_raw = lax.optimization_barrier(d_raw.astype(q.dtype))
            d_query = product(d_raw, _at(keys, j))
            d_key_t = product(_at(queries_t, i), d_raw)
            d_value_t = product(_at(d_outs_t, i), weight.astype(q.dtype))
            parts = zip(carry, (d_query, d_key_t, d_value_t), (i, j, j))
            return tuple(_put(part, _at(part, at) + new, at) for part, new, at in parts), None

        start = tuple(vary_like(jnp.zeros(part.shape, wide), queries) for part in (queries, keys_t, values_t))
        d_q, d_k, d_v = (part.astype(result_dtype) for part in _walk(step, start, pairs))
        return from_query_blocks(d_q, cut), from_key_blocks_t(d_k, cut), from_key_blocks_t(d_v, cut)

    arrays = (q, k, v, output.d_out, output.logsumexp, output.delta, query_segments, key_segments)
    outputs = tuple(jnp.zeros(x.shape, result_dtype) for x in (q, k, v))
    d_q, d_k, d_v = _over_rows(attend, arrays, outputs, cut)
    return d_q, d_k, d_v


def _score(raw: Array, scores: ScoreRule) -> tuple[Array, Array | float]:
    """Return the scaled and capped score, and its derivative with respect to the raw score."""
    if scores.soft_cap is None:
        return raw * scores.scale, scores.scale
    bounded = jnp.tanh(raw * (scores.scale / scores.soft_cap))
    return scores.soft_cap * bounded, scores.scale * (1.0 - bounded * bounded)


def _visible(
    mask: MaskRule, cut: ScoreLayout, i: Array, j: Array, query_segment: Array | None, key_segment: Array | None
) -> Array | None:
    """Return the mask of block (i, j): [rows or 1, group * query block, key block]; None if all scores are
    visible."""
    blocks = cut.blocks
    key = j * blocks.key + jnp.arange(blocks.key)[None, None, :]
    visible = None
    if not mask.is_full:
        # The queries of a group's heads are concatenated, so positions repeat.
        query = i * blocks.query + jnp.tile(jnp.arange(blocks.query), cut.r)[None, :, None]
        visible = mask.allows(query, key)
    if cut.key_blocks * blocks.key > cut.k:
        inside = key < cut.k
        visible = inside if visible is None else visible & inside
    if query_segment is not None and key_segment is not None:
        left, right = jnp.tile(_at(query_segment, i), (1, cut.r))[:, :, None], _at(key_segment, j)[:, None, :]
        together = (left == right) & (left != 0)
        visible = together if visible is None else visible & together
    return visible


def _walk(step, start, pairs: list[tuple[int, int]]):
    """Fold `step` over the pairs, without a loop for a single pair."""
    if len(pairs) <= 1:
        for pair in pairs:
            start, _ = step(start, jnp.asarray(pair, jnp.int32))
        return start
    return lax.scan(step, start, jnp.asarray(pairs, jnp.int32))[0]


def _over_rows(
    attend, arrays: tuple[Array | None, ...], outputs: tuple[Array, ...], cut: ScoreLayout
) -> tuple[Array, ...]:
    """Apply `attend` to each chunk of (batch, key-value heads) rows, and store its results in `outputs`.

    Args:
        arrays: [batch, seq, heads, ...] or [batch, seq].
        outputs: [batch, seq, heads, ...], filled in place.
    """
    blocks = cut.blocks
    starts = [(i, j) for i in range(0, cut.b, blocks.batch) for j in range(0, cut.g, blocks.kv_heads)]
    if len(starts) == 1:
        return attend(arrays)

    def heads_at(x: Array, head: Array) -> tuple[Array | int, int]:
        """Return the index of the chunk's first head in `x`, which has query heads or key-value heads, and
        their number."""
        group = x.shape[2] // cut.g
        return head * group, blocks.kv_heads * group

    def step(outputs, start):
        row, head = start[0], start[1]
        chunk = []
        for x in arrays:
            if x is not None:
                x = lax.dynamic_slice_in_dim(x, row, blocks.batch, axis=0)
                x = x if x.ndim == 2 else lax.dynamic_slice_in_dim(x, *heads_at(x, head), axis=2)
            chunk.append(x)
        filled = []
        for output, part in zip(outputs, attend(chunk)):
            at = (row, 0, heads_at(output, head)[0], *(0 for _ in output.shape[3:]))
            filled.append(lax.dynamic_update_slice(output, part, at))
        return tuple(filled), None

    references = [x for x in arrays if x is not None]
    outputs = tuple(vary_like(x, *references) for x in outputs)
    return lax.scan(step, outputs, jnp.asarray(starts, jnp.int32))[0]


def _at(blocks: Array, index: Array) -> Array:
    return lax.dynamic_index_in_dim(blocks, index, axis=0, keepdims=False)


def _put(blocks: Array, new: Array, index: Array) -> Array:
    return lax.dynamic_update_index_in_dim(blocks, new, index, axis=0)


register(Kernel(work="partial attention", name="blockwise", run=AttentionPasses(_forward, _backward), rank=10))
