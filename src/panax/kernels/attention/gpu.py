"""Flash attention for GPUs, forward and backward, in Pallas (Triton): the cases that cuDNN lacks, in one
kernel.

Grouped queries, packed segments, causal masks, windows and soft-caps in any combination. The kernels only
loop over the key blocks that a query block can see (or the reverse), so that masked blocks, and blocks of
other documents, cost nothing.

Source: FlashAttention-2 (arXiv:2307.08691). Based on `jax.experimental.pallas.ops.gpu.attention`, which as of
jax 0.10.2 has neither grouped queries, windows nor soft-caps, and averages the values of padding. Other
differences: the loop bounds come from a small array computed outside, and the gradient of a key-value head
sums over the query heads of its group inside one program: no repeated keys, no atomic additions, so results
are deterministic.

jax 0.12 lowers these kernels with a DeprecationWarning: a later Pallas will support Mosaic GPU and drop
Triton. They need to be ported, to Mosaic GPU or to jax_triton, before the bound on jax is raised.
"""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from panax.kernels.attention.blockwise import output_delta
from panax.kernels.attention.bounds import block_bounds, pad_to, round_up
from panax.kernels.attention.mask import MASKED, MIN_MAXIMUM
from panax.kernels.attention.operands import AttentionOperands, OutputGradient, ScoreRule
from panax.kernels.attention.sinks import add_sinks, sink_gradient
from panax.kernels.varying_axes import output_struct, vary_alike, vary_like

# Exponentials have base 2, as the GPU's instructions; scores are multiplied by this first.
_LOG2_E = math.log2(math.e)


@dataclasses.dataclass(frozen=True, kw_only=True)
class GpuLaunch:
    """How the kernels are launched: the sizes of the blocks that one program holds in registers and shared memory,
    powers of two of at least 16, and its warps.

    Attributes:
        interpret: Run the kernels as ordinary JAX operations on any backend, slowly.
    """

    query: int
    key: int
    backward_query: int
    backward_key: int
    num_warps: int
    interpret: bool = False

    @staticmethod
    def for_head_dim(head_dim: int, item_bytes: int) -> "GpuLaunch":
        """Return blocks that fit the shared memory of an A100 and of newer GPUs."""
        if head_dim > 128 or (item_bytes == 4 and head_dim > 64):
            return GpuLaunch(query=64, key=32, backward_query=32, backward_key=32, num_warps=4)
        if head_dim > 64 or item_bytes == 4:
            return GpuLaunch(query=128, key=64, backward_query=64, backward_key=32, num_warps=8)
        return GpuLaunch(query=128, key=64, backward_query=64, backward_key=64, num_warps=4)


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Options:
    scores: ScoreRule
    launch: GpuLaunch
    query_seq: int  # before padding
    key_seq: int


def gpu_attention(
    q: Float[Array, "batch query_seq heads head_dim"],
    k: Float[Array, "batch key_seq kv_heads head_dim"],
    v: Float[Array, "batch key_seq kv_heads head_dim"],
    segments: Int[Array, "batch seq"] | None,
    *,
    scores: ScoreRule,
    sinks: Float[Array, " heads"] | None = None,
    launch: GpuLaunch | None = None,
) -> Float[Array, "batch query_seq heads head_dim"]:
    """Compute exact attention by Triton kernels. Arrays as in `attention`; lengths and head_dim are padded
    to whole blocks.

    Args:
        launch: By default `GpuLaunch.for_head_dim`.
    """
    (query_seq, _, head_dim), key_seq = q.shape[1:], k.shape[1]
    launch = launch or GpuLaunch.for_head_dim(head_dim, q.dtype.itemsize)
    options = _Options(scores=scores, launch=launch, query_seq=query_seq, key_seq=key_seq)
    q, k, v, segments = vary_alike(q, k, v, segments)
    sinks = None if sinks is None else vary_like(sinks, q)
    query_length = round_up(query_seq, max(launch.query, launch.backward_query))
    key_length = round_up(key_seq, max(launch.key, launch.backward_key))
    width = max(16, pl.next_power_of_2(head_dim))
    query_segments = None if segments is None else pad_to(segments.astype(jnp.int32), {1: query_length})
    key_segments = None if segments is None else pad_to(segments.astype(jnp.int32), {1: key_length})
    q = pad_to(q, {1: query_length, 3: width})
    k, v = (pad_to(x, {1: key_length, 3: width}) for x in (k, v))
    out: Array = _attention(q, k, v, query_segments, key_segments, sinks, options)
    return out[:, :query_seq, :, :head_dim]


@functools.partial(jax.custom_vjp, nondiff_argnums=(6,))
def _attention(q, k, v, query_segments, key_segments, sinks, options):
    return _forward_saving(q, k, v, query_segments, key_segments, sinks, options)[0]


def _forward_saving(q, k, v, query_segments, key_segments, sinks, options):
    out_dtype = q.dtype if sinks is None else jnp.float32
    out, logsumexp = _forward(AttentionOperands(q, k, v, query_segments, key_segments), options, out_dtype)
    if sinks is not None:
        # Heads last, and natural logarithms, as `add_sinks` has them.
        out, natural = add_sinks(out, logsumexp.swapaxes(1, 2) / _LOG2_E, sinks)
        out, logsumexp = out.astype(q.dtype), natural.swapaxes(1, 2) * _LOG2_E
    return out, (q, k, v, query_segments, key_segments, sinks, out, logsumexp)


def _backward(options, saved, d_out):
    q, k, v, query_segments, key_segments, sinks, out, logsumexp = saved
    delta = output_delta(out, d_out).swapaxes(1, 2)
    operands = AttentionOperands(q, k, v, query_segments, key_segments)
    output = OutputGradient(logsumexp, delta, d_out)
    d_k, d_v = _gradients_of_keys(operands, output, options)
    d_sinks = sink_gradient(sinks, logsumexp.swapaxes(1, 2) / _LOG2_E, delta.swapaxes(1, 2))
    return _gradient_of_queries(operands, output, options), d_k, d_v, None, None, d_sinks


_attention.defvjp(_forward_saving, _backward)


def _forward(operands: AttentionOperands, options: _Options, out_dtype: DTypeLike):
    q, k, v, query_segments, key_segments = operands
    batch, query_seq, heads, width = q.shape
    key_seq, group, tiles = k.shape[1], heads // k.shape[2], options.launch
    blocks = query_seq // tiles.query
    bounds = _bounds(operands, options, (tiles.query, tiles.key))

    def kernel(q_ref, k_ref, v_ref, bounds_ref, query_segment_ref, key_segment_ref, out_ref, logsumexp_ref):
        i = _heaviest_first(blocks)
        query = i * tiles.query + jnp.arange(tiles.query)
        queries = q_ref[...]
        query_segment = None if query_segment_ref is None else query_segment_ref[...]

        def body(j, carry):
            total, highest, out = carry
            keys = pl.ds(j * tiles.key, tiles.key)
            score, _ = _scores(queries, k_ref[keys, :], query, j, query_segment, key_segment_ref, options)
            highest_now = jnp.maximum(highest, score.max(axis=1))
            weight = jnp.exp2(score - highest_now[:, None])
            shrink = jnp.exp2(highest - highest_now)
            values = v_ref[keys, :]
            out = out * shrink[:, None] + _product(weight.astype(values.dtype), values)
            return total * shrink + weight.sum(axis=1), highest_now, out

        start = (
            jnp.zeros(tiles.query, jnp.float32),
            jnp.full(tiles.query, MIN_MAXIMUM, jnp.float32),
            jnp.zeros((tiles.query, width), jnp.float32),
        )
        total, highest, out = lax.fori_loop(bounds_ref[0], bounds_ref[1], body, start)
        any_visible = total > 0
        total = jnp.where(any_visible, total, 1.0)
        out_ref[...] = (out / total[:, None]).astype(out_ref.dtype)
        # In base 2. If no key is visible every score is masked, so that the value is irrelevant.
        logsumexp_ref[...] = jnp.where(any_visible, highest + jnp.log2(total), 0.0)

    at = functools.partial(_heavy_index, blocks)
    return pl.pallas_call(
        kernel,
        grid=(blocks, batch, heads),
        in_specs=[
            pl.BlockSpec((None, tiles.query, None, width), lambda i, b, h: (b, at(i), h, 0)),
            pl.BlockSpec((None, key_seq, None, width), lambda i, b, h: (b, 0, h // group, 0)),
            pl.BlockSpec((None, key_seq, None, width), lambda i, b, h: (b, 0, h // group, 0)),
            pl.BlockSpec((None, None, 2), lambda i, b, h: (b, at(i), 0)),
            None if query_segments is None else pl.BlockSpec((None, tiles.query), lambda i, b, h: (b, at(i))),
            None if key_segments is None else pl.BlockSpec((None, key_seq), lambda i, b, h: (b, 0)),
        ],
        out_specs=[
            pl.BlockSpec((None, tiles.query, None, width), lambda i, b, h: (b, at(i), h, 0)),
            pl.BlockSpec((None, None, tiles.query), lambda i, b, h: (b, h, at(i))),
        ],
        out_shape=[output_struct(q.shape, out_dtype, q), output_struct((batch, heads, query_seq), jnp.float32, q)],
        compiler_params=plt.CompilerParams(num_warps=tiles.num_warps, num_stages=2),
        interpret=options.launch.interpret,
        name="panax_attention_forward",
    )(q, k, v, bounds, query_segments, key_segments)


def _gradient_of_queries(operands: AttentionOperands, output: OutputGradient, options: _Options) -> Array:
    q, k, v, query_segments, key_segments = operands
    batch, query_seq, heads, width = q.shape
    key_seq, group, tiles = k.shape[1], heads // k.shape[2], options.launch
    size_q, size_k = tiles.backward_query, tiles.backward_key
    blocks = query_seq // size_q
    bounds = _bounds(operands, options, (size_q, size_k))

    def kernel(q_ref, k_ref, v_ref, bounds_ref, query_segment_ref, key_segment_ref, sum_ref, delta_ref, do_ref, dq_ref):
        query = _heaviest_first(blocks) * size_q + jnp.arange(size_q)
        queries, d_out, logsumexp, delta = q_ref[...], do_ref[...], sum_ref[...], delta_ref[...]
        query_segment = None if query_segment_ref is None else query_segment_ref[...]

        def body(j, d_queries):
            keys = k_ref[pl.ds(j * size_k, size_k), :]
            score, slope = _scores(queries, keys, query, j, query_segment, key_segment_ref, options)
            weight = jnp.exp2(score - logsumexp[:, None])
            d_weight = _product(d_out, v_ref[pl.ds(j * size_k, size_k), :].T)
            d_raw = weight * (d_weight - delta[:, None]) * slope
            return d_queries + _product(d_raw.astype(keys.dtype), keys)

        start = jnp.zeros((size_q, width), jnp.float32)
        dq_ref[...] = lax.fori_loop(bounds_ref[0], bounds_ref[1], body, start).astype(dq_ref.dtype)

    at = functools.partial(_heavy_index, blocks)
    query_spec = pl.BlockSpec((None, size_q, None, width), lambda i, b, h: (b, at(i), h, 0))
    key_spec = pl.BlockSpec((None, key_seq, None, width), lambda i, b, h: (b, 0, h // group, 0))
    row_spec = pl.BlockSpec((None, None, size_q), lambda i, b, h: (b, h, at(i)))
    return pl.pallas_call(
        kernel,
        grid=(blocks, batch, heads),
        in_specs=[
            query_spec,
            key_spec,
            key_spec,
            pl.BlockSpec((None, None, 2), lambda i, b, h: (b, at(i), 0)),
            None if query_segments is None else pl.BlockSpec((None, size_q), lambda i, b, h: (b, at(i))),
            None if key_segments is None else pl.BlockSpec((None, key_seq), lambda i, b, h: (b, 0)),
            row_spec,
            row_spec,
            query_spec,
        ],
        out_specs=query_spec,
        out_shape=output_struct(q.shape, q.dtype, q),
        compiler_params=plt.CompilerParams(num_warps=4, num_stages=2),
        interpret=options.launch.interpret,
        name="panax_attention_gradient_of_queries",
    )(q, k, v, bounds, query_segments, key_segments, *output)


def _gradients_of_keys(operands: AttentionOperands, output: OutputGradient, options: _Options):
    q, k, v, query_segments, key_segments = operands
    batch, query_seq, heads, width = q.shape
    key_seq, kv_heads, tiles = k.shape[1], k.shape[2], options.launch
    group, size_q, size_k = heads // kv_heads, tiles.backward_query, tiles.backward_key
    blocks = key_seq // size_k
    bounds = _bounds(operands, options, (size_q, size_k), of_keys=True)

    def kernel(
        q_ref, k_ref, v_ref, bounds_ref, query_segment_ref, key_segment_ref, sum_ref, delta_ref, do_ref, dk_ref, dv_ref
    ):
        j = pl.program_id(0)
        keys, values = k_ref[...], v_ref[...]

        def of_head(r, carry):
            def body(i, carry):
                d_keys, d_values = carry
                rows = pl.ds(i * size_q, size_q)
                query = i * size_q + jnp.arange(size_q)
                queries, d_out = q_ref[rows, r, :], do_ref[rows, r, :]
                query_segment = None if query_segment_ref is None else query_segment_ref[rows]
                score, slope = _scores(queries, keys, query, j, query_segment, key_segment_ref, options)
                weight = jnp.exp2(score - sum_ref[r, rows][:, None])
                d_values += _product(weight.astype(d_out.dtype).T, d_out)
                d_weight = _product(d_out, values.T)
                d_raw = weight * (d_weight - delta_ref[r, rows][:, None]) * slope
                return d_keys + _product(d_raw.astype(queries.dtype).T, queries), d_values

            return lax.fori_loop(bounds_ref[0], bounds_ref[1], body, carry)

        zero = jnp.zeros((size_k, width), jnp.float32)
        d_keys, d_values = lax.fori_loop(0, group, of_head, (zero, zero))
        dk_ref[...] = d_keys.astype(dk_ref.dtype)
        dv_ref[...] = d_values.astype(dv_ref.dtype)

    group_spec = pl.BlockSpec((None, query_seq, group, width), lambda j, b, g: (b, 0, g, 0))
    key_spec = pl.BlockSpec((None, size_k, None, width), lambda j, b, g: (b, j, g, 0))
    row_spec = pl.BlockSpec((None, group, query_seq), lambda j, b, g: (b, g, 0))
    return pl.pallas_call(
        kernel,
        grid=(blocks, batch, kv_heads),
        in_specs=[
            group_spec,
            key_spec,
            key_spec,
            pl.BlockSpec((None, None, 2), lambda j, b, g: (b, j, 0)),
            None if query_segments is None else pl.BlockSpec((None, query_seq), lambda j, b, g: (b, 0)),
            None if key_segments is None else pl.BlockSpec((None, key_seq), lambda j, b, g: (b, 0)),
            row_spec,
            row_spec,
            group_spec,
        ],
        out_specs=[key_spec, key_spec],
        out_shape=[output_struct(k.shape, k.dtype, k), output_struct(v.shape, v.dtype, v)],
        compiler_params=plt.CompilerParams(num_warps=4, num_stages=2),
        interpret=options.launch.interpret,
        name="panax_attention_gradients_of_keys",
    )(q, k, v, bounds, query_segments, key_segments, *output)


def _scores(queries, keys, query, j, query_segment, key_segment_ref, options: _Options):
    """Compute masked scores of one tile for base-2 exponentials, and the derivative of the natural ones with
    respect to the raw score."""
    raw, scores, key_block = _product(queries, keys.T), options.scores, keys.shape[0]
    if scores.soft_cap is None:
        score, slope = raw * (scores.scale * _LOG2_E), scores.scale
    else:
        bounded = jnp.tanh(raw * (scores.scale / scores.soft_cap))
        score, slope = bounded * (scores.soft_cap * _LOG2_E), scores.scale * (1.0 - bounded * bounded)
    key = j * key_block + jnp.arange(key_block)
    visible = (key < options.key_seq)[None, :]
    if not scores.mask.is_full:
        visible = visible & scores.mask.allows(query[:, None], key[None, :])
    if query_segment is not None:
        key_segment = key_segment_ref[pl.ds(j * key_block, key_block)]
        visible = visible & (query_segment[:, None] == key_segment[None, :]) & (query_segment != 0)[:, None]
    return jnp.where(visible, score, MASKED), slope


def _product(left, right):
    # Full float32 matmuls of float32 arrays; 16-bit arrays are multiplied without conversion.
    return plt.dot(left, right, allow_tf32=False)


def _heavy_index(blocks: int, i):
    return blocks - 1 - i


def _heaviest_first(blocks: int):
    """Return the query block of this program: the last, which sees the most keys under a causal mask, starts
    first."""
    return _heavy_index(blocks, pl.program_id(0))


def _bounds(operands: AttentionOperands, options: _Options, sizes: tuple[int, int], *, of_keys: bool = False):
    """Compute `block_bounds` of every sequence of the batch."""
    q, k, _, query_segments, key_segments = operands
    real, padded = (options.query_seq, options.key_seq), (q.shape[1], k.shape[1])
    bounds = block_bounds(query_segments, key_segments, options.scores.mask, real, padded, sizes, of_keys=of_keys)
    return vary_like(jnp.broadcast_to(bounds, (q.shape[0], *bounds.shape[1:])), q)
