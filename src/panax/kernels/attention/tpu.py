"""Flash attention for TPUs, forward and backward, in Pallas (Mosaic).

Grouped queries, packed segments, causal masks, windows and soft-caps in any combination. The grid's last
dimension walks the blocks that the accumulators of one block sum over. Invisible blocks, by position or
because they hold other documents, are neither computed nor fetched: their index is clamped to the nearest
visible one.

Scores are transposed, [keys, queries], so that the values of a query (its running maximum, its sum, its
segment) form a row, along the lanes, as in memory. The matmuls then contract the first dimensions, which the
matrix unit supports.

Source: FlashAttention-2 (arXiv:2307.08691). `jax.experimental.pallas.ops.tpu.splash_attention` can't be used
instead: as of jax 0.10.2 it fails inside `shard_map(check_vma=True)`, because it doesn't declare how its
outputs vary.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from panax.kernels.attention.blockwise import output_delta
from panax.kernels.attention.bounds import block_bounds, pad_to, round_up
from panax.kernels.attention.mask import MASKED, MIN_MAXIMUM
from panax.kernels.attention.operands import AttentionOperands, OutputGradient, ScoreRule
from panax.kernels.attention.sinks import add_sinks, sink_gradient
from panax.kernels.varying_axes import output_struct, vary_alike, vary_like

_LANES = 128
_PARALLEL_BUT_LAST = pltpu.CompilerParams(dimension_semantics=("parallel", "parallel", "parallel", "arbitrary"))


@dataclasses.dataclass(frozen=True, kw_only=True)
class TpuLaunch:
    """How the kernels are launched.

    Attributes:
        block: Maximum number of queries and keys per block; a multiple of 128.
        interpret: Run the kernels as ordinary JAX operations on any backend, slowly.
    """

    block: int = 512
    interpret: bool = False


_DEFAULT_LAUNCH = TpuLaunch()


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Options:
    scores: ScoreRule
    query_block: int
    key_block: int
    query_seq: int  # before padding
    key_seq: int
    interpret: bool


def tpu_attention(
    q: Float[Array, "batch query_seq heads head_dim"],
    k: Float[Array, "batch key_seq kv_heads head_dim"],
    v: Float[Array, "batch key_seq kv_heads head_dim"],
    segments: Int[Array, "batch seq"] | None,
    *,
    scores: ScoreRule,
    sinks: Float[Array, " heads"] | None = None,
    launch: TpuLaunch = _DEFAULT_LAUNCH,
) -> Float[Array, "batch query_seq heads head_dim"]:
    """Compute exact attention by Mosaic kernels. Arrays as in `attention`; lengths are padded to whole
    blocks."""
    query_seq, key_seq = q.shape[1], k.shape[1]
    options = _Options(
        scores=scores,
        query_block=min(launch.block, round_up(query_seq, _LANES)),
        key_block=min(launch.block, round_up(key_seq, _LANES)),
        query_seq=query_seq,
        key_seq=key_seq,
        interpret=launch.interpret,
    )
    q, k, v, segments = vary_alike(q, k, v, segments)
    sinks = None if sinks is None else vary_like(sinks, q)
    query_length, key_length = round_up(query_seq, options.query_block), round_up(key_seq, options.key_block)
    query_segments = key_segments = None
    if segments is not None:
        # Rows for queries, columns for keys, as the transposed scores require.
        query_segments = pad_to(segments.astype(jnp.int32), {1: query_length})[:, None, :]
        key_segments = pad_to(segments.astype(jnp.int32), {1: key_length})[:, :, None]
    q = pad_to(q.swapaxes(1, 2), {2: query_length})
    k, v = (pad_to(x.swapaxes(1, 2), {2: key_length}) for x in (k, v))
    out: Array = _attention(q, k, v, query_segments, key_segments, sinks, options)
    return out[:, :, :query_seq].swapaxes(1, 2)


@functools.partial(jax.custom_vjp, nondiff_argnums=(6,))
def _attention(q, k, v, query_segments, key_segments, sinks, options):
    return _forward_saving(q, k, v, query_segments, key_segments, sinks, options)[0]


def _forward_saving(q, k, v, query_segments, key_segments, sinks, options):
    out_dtype = q.dtype if sinks is None else jnp.float32
    out, logsumexp = _forward(AttentionOperands(q, k, v, query_segments, key_segments), options, out_dtype)
    if sinks is not None:
        # Heads last, as `add_sinks` has them.
        wide, sums = add_sinks(out.swapaxes(1, 2), logsumexp[:, :, 0].swapaxes(1, 2), sinks)
        out, logsumexp = wide.swapaxes(1, 2).astype(q.dtype), sums.swapaxes(1, 2)[:, :, None]
    return out, (q, k, v, query_segments, key_segments, sinks, out, logsumexp)


def _backward(options, saved, d_out):
    q, k, v, query_segments, key_segments, sinks, out, logsumexp = saved
    delta = output_delta(out, d_out)[:, :, None, :]
    operands = AttentionOperands(q, k, v, query_segments, key_segments)
    output = OutputGradient(logsumexp, delta, d_out)
    d_k, d_v = _gradients_of_keys(operands, output, options)
    d_sinks = sink_gradient(sinks, logsumexp[:, :, 0].swapaxes(1, 2), delta[:, :, 0].swapaxes(1, 2))
    return _gradient_of_queries(operands, output, options), d_k, d_v, None, None, d_sinks


_attention.defvjp(_forward_saving, _backward)


def _forward(operands: AttentionOperands, options: _Options, out_dtype: DTypeLike):
    q, k, query_segments = operands.q, operands.k, operands.query_segments
    batch, heads, query_seq, width = q.shape
    query_block = options.query_block

    def kernel(bounds, q_ref, k_ref, v_ref, q_segment, k_segment, out_ref, sum_ref, total_ref, highest_ref, acc_ref):
        b, i, j = pl.program_id(0), pl.program_id(2), pl.program_id(3)

        @pl.when(j == 0)
        def _():
            total_ref[...] = jnp.zeros(total_ref.shape, jnp.float32)
            highest_ref[...] = jnp.full(highest_ref.shape, MIN_MAXIMUM, jnp.float32)
            acc_ref[...] = jnp.zeros(acc_ref.shape, jnp.float32)

        @pl.when((bounds[b, i, 0] <= j) & (j < bounds[b, i, 1]))
        def _():
            score, _ = _scores(q_ref[...], k_ref[...], i, j, q_segment, k_segment, options)
            highest = highest_ref[...]
            highest_now = jnp.maximum(highest, score.max(axis=0, keepdims=True))
            weight = jnp.exp(score - highest_now)
            shrink = jnp.exp(highest - highest_now)
            values = v_ref[...]
            total_ref[...] = total_ref[...] * shrink + weight.sum(axis=0, keepdims=True)
            acc_ref[...] = acc_ref[...] * shrink + _product(values, weight.astype(values.dtype), 0, 0)
            highest_ref[...] = highest_now

        @pl.when(j == pl.num_programs(3) - 1)
        def _():
            any_visible = total_ref[...] > 0
            total = jnp.where(any_visible, total_ref[...], 1.0)
            out_ref[...] = (acc_ref[...] / total).T.astype(out_ref.dtype)
            sum_ref[...] = jnp.where(any_visible, highest_ref[...] + jnp.log(total), 0.0)

    query_spec, key_spec, segment_specs, row_spec = _specs(q, k, query_segments, options)
    return pl.pallas_call(
        kernel,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(batch, heads, query_seq // query_block, k.shape[2] // options.key_block),
            in_specs=[query_spec, key_spec, key_spec, *segment_specs],
            out_specs=[query_spec, row_spec],
            scratch_shapes=[
                pltpu.VMEM((1, query_block), jnp.float32),
                pltpu.VMEM((1, query_block), jnp.float32),
                pltpu.VMEM((width, query_block), jnp.float32),
            ],
        ),
        out_shape=[output_struct(q.shape, out_dtype, q), output_struct((batch, heads, 1, query_seq), jnp.float32, q)],
        compiler_params=_PARALLEL_BUT_LAST,
        interpret=options.interpret,
        name="panax_attention_forward",
    )(_bounds(operands, options), *operands)


def _gradient_of_queries(operands: AttentionOperands, output: OutputGradient, options: _Options) -> Array:
    q, k, query_segments = operands.q, operands.k, operands.query_segments
    batch, heads, query_seq, width = q.shape

    def kernel(bounds, q_ref, k_ref, v_ref, q_segment, k_segment, sum_ref, delta_ref, do_ref, dq_ref, acc_ref):
        b, i, j = pl.program_id(0), pl.program_id(2), pl.program_id(3)

        @pl.when(j == 0)
        def _():
            acc_ref[...] = jnp.zeros(acc_ref.shape, jnp.float32)

        @pl.when((bounds[b, i, 0] <= j) & (j < bounds[b, i, 1]))
        def _():
            keys = k_ref[...]
            score, slope = _scores(q_ref[...], keys, i, j, q_segment, k_segment, options)
            weight = jnp.exp(score - sum_ref[...])
            d_weight = _product(v_ref[...], do_ref[...], 1, 1)
            d_raw = weight * (d_weight - delta_ref[...]) * slope
            acc_ref[...] += _product(d_raw.astype(keys.dtype), keys, 0, 0)

        @pl.when(j == pl.num_programs(3) - 1)
        def _():
            dq_ref[...] = acc_ref[...].astype(dq_ref.dtype)

    query_spec, key_spec, segment_specs, row_spec = _specs(q, k, query_segments, options)
    return pl.pallas_call(
        kernel,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(batch, heads, query_seq // options.query_block, k.shape[2] // options.key_block),
            in_specs=[query_spec, key_spec, key_spec, *segment_specs, row_spec, row_spec, query_spec],
            out_specs=query_spec,
            scratch_shapes=[pltpu.VMEM((options.query_block, width), jnp.float32)],
        ),
        out_shape=output_struct(q.shape, q.dtype, q),
        compiler_params=_PARALLEL_BUT_LAST,
        interpret=options.interpret,
        name="panax_attention_gradient_of_queries",
    )(_bounds(operands, options), *operands, *output)


def _gradients_of_keys(operands: AttentionOperands, output: OutputGradient, options: _Options):
    q, k, v, query_segments, _ = operands
    batch, heads, query_seq, width = q.shape
    kv_heads, key_seq = k.shape[1:3]
    group, query_blocks = heads // kv_heads, query_seq // options.query_block

    def kernel(
        bounds, q_ref, k_ref, v_ref, q_segment, k_segment, sum_ref, delta_ref, do_ref, dk_ref, dv_ref, *acc_refs
    ):
        b, j, step = pl.program_id(0), pl.program_id(2), pl.program_id(3)
        i = lax.rem(step, query_blocks)

        @pl.when(step == 0)
        def _():
            for acc_ref in acc_refs:
                acc_ref[...] = jnp.zeros(acc_ref.shape, jnp.float32)

        @pl.when((bounds[b, j, 0] <= i) & (i < bounds[b, j, 1]))
        def _():
            queries, d_out = q_ref[...], do_ref[...]
            score, slope = _scores(queries, k_ref[...], i, j, q_segment, k_segment, options)
            weight = jnp.exp(score - sum_ref[...])
            d_weight = _product(v_ref[...], d_out, 1, 1)
            d_raw = weight * (d_weight - delta_ref[...]) * slope
            acc_refs[0][...] += _product(d_raw.astype(queries.dtype), queries, 1, 0)
            acc_refs[1][...] += _product(weight.astype(d_out.dtype), d_out, 1, 0)

        @pl.when(step == pl.num_programs(3) - 1)
        def _():
            dk_ref[...] = acc_refs[0][...].astype(dk_ref.dtype)
            dv_ref[...] = acc_refs[1][...].astype(dv_ref.dtype)

    def query_at(b, j, step, bounds):
        return _clamp_to_visible(lax.rem(step, query_blocks), bounds, b, j)

    def head_at(g, step):
        return g * group + lax.div(step, query_blocks)

    query_spec = pl.BlockSpec(
        (None, None, options.query_block, width),
        lambda b, g, j, step, bounds: (b, head_at(g, step), query_at(b, j, step, bounds), 0),
    )
    row_spec = pl.BlockSpec(
        (None, None, 1, options.query_block),
        lambda b, g, j, step, bounds: (b, head_at(g, step), 0, query_at(b, j, step, bounds)),
    )
    key_spec = pl.BlockSpec((None, None, options.key_block, width), lambda b, g, j, step, bounds: (b, g, j, 0))
    segment_specs = [None, None]
    if query_segments is not None:
        segment_specs = [
            pl.BlockSpec(
                (None, 1, options.query_block),
                lambda b, g, j, step, bounds: (b, 0, query_at(b, j, step, bounds)),
            ),
            pl.BlockSpec((None, options.key_block, 1), lambda b, g, j, step, bounds: (b, j, 0)),
        ]
    bounds = _bounds(operands, options, of_keys=True)
    return pl.pallas_call(
        kernel,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(batch, kv_heads, key_seq // options.key_block, group * query_blocks),
            in_specs=[query_spec, key_spec, key_spec, *segment_specs, row_spec, row_spec, query_spec],
            out_specs=[key_spec, key_spec],
            scratch_shapes=[pltpu.VMEM((options.key_block, width), jnp.float32)] * 2,
        ),
        out_shape=[output_struct(k.shape, k.dtype, k), output_struct(v.shape, v.dtype, v)],
        compiler_params=_PARALLEL_BUT_LAST,
        interpret=options.interpret,
        name="panax_attention_gradients_of_keys",
    )(bounds, *operands, *output)


def _specs(q: Array, k: Array, query_segments: Array | None, options: _Options):
    """Return specs of queries, keys, segments and per-query rows on a grid of (batch, head, query block, key
    block)."""
    group, width = q.shape[1] // k.shape[1], q.shape[3]
    query_spec = pl.BlockSpec((None, None, options.query_block, width), lambda b, h, i, j, bounds: (b, h, i, 0))
    key_spec = pl.BlockSpec(
        (None, None, options.key_block, width),
        lambda b, h, i, j, bounds: (b, lax.div(h, group), _clamp_to_visible(j, bounds, b, i), 0),
    )
    row_spec = pl.BlockSpec((None, None, 1, options.query_block), lambda b, h, i, j, bounds: (b, h, 0, i))
    if query_segments is None:
        return query_spec, key_spec, [None, None], row_spec
    segment_specs = [
        pl.BlockSpec((None, 1, options.query_block), lambda b, h, i, j, bounds: (b, 0, i)),
        pl.BlockSpec(
            (None, options.key_block, 1), lambda b, h, i, j, bounds: (b, _clamp_to_visible(j, bounds, b, i), 0)
        ),
    ]
    return query_spec, key_spec, segment_specs, row_spec


def _clamp_to_visible(index, bounds, b, row):
    """Clamp the index to the visible range: a block with an unchanged index is not fetched again."""
    first, stop = bounds[b, row, 0], bounds[b, row, 1]
    return jnp.maximum(jnp.minimum(index, stop - 1), first)


def _scores(queries, keys, i, j, query_segment_ref, key_segment_ref, options: _Options):
    """Compute masked scores of one tile, [keys, queries], and their derivative with respect to the raw
    score."""
    raw, scores = _product(keys, queries, 1, 1), options.scores
    if scores.soft_cap is None:
        score, slope = raw * scores.scale, scores.scale
    else:
        bounded = jnp.tanh(raw * (scores.scale / scores.soft_cap))
        score, slope = bounded * scores.soft_cap, scores.scale * (1.0 - bounded * bounded)
    query = i * options.query_block + lax.broadcasted_iota(jnp.int32, raw.shape, 1)
    key = j * options.key_block + lax.broadcasted_iota(jnp.int32, raw.shape, 0)
    visible = key < options.key_seq
    if not scores.mask.is_full:
        visible = visible & scores.mask.allows(query, key)
    if query_segment_ref is not None:
        query_segment, key_segment = query_segment_ref[...], key_segment_ref[...]
        visible = visible & (query_segment == key_segment) & (query_segment != 0)
    return jnp.where(visible, score, MASKED), slope


def _product(left, right, left_dim: int, right_dim: int):
    precision = lax.Precision.HIGHEST if left.dtype == jnp.float32 else None
    dimensions = (((left_dim,), (right_dim,)), ((), ()))
    return lax.dot_general(left, right, dimensions, precision=precision, preferred_element_type=jnp.float32)


def _bounds(operands: AttentionOperands, options: _Options, *, of_keys: bool = False):
    """Compute `block_bounds` of every sequence of the batch."""
    q, k, _, query_segments, key_segments = operands
    real, padded = (options.query_seq, options.key_seq), (q.shape[2], k.shape[2])
    bounds = block_bounds(
        None if query_segments is None else query_segments[:, 0, :],
        None if key_segments is None else key_segments[:, :, 0],
        options.scores.mask,
        real,
        padded,
        (options.query_block, options.key_block),
        of_keys=of_keys,
    )
    return vary_like(jnp.broadcast_to(bounds, (q.shape[0], *bounds.shape[1:])), q)
