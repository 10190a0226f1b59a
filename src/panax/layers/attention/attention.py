"""Grouped-query attention with the options of current decoder models."""

import functools
import math
from typing import Any, Literal, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float, Int, Shaped

from ...core import (
    Module,
    constant,
    current_target,
    normal,
    parameter,
)
from ...core.layout.layout import axis_size, current_layout, row_order
from ...core.layout.requirements import AllToAllRequirement
from ...kernels.attention.attention import AttentionOptions, attention
from ...kernels.attention.key_cache import CachedKeys, cached_attention
from ...kernels.attention.mask import MaskRule
from ...kernels.attention.operands import ScoreRule
from ...kernels.registry import refuse_exact
from ...parallel.context import ContextAxis
from ...parallel.context_choice import ContextAttention, context_attention
from ...spmd import add_bias, contract, contract_gathered, gather, psum_both
from ..norm import Norm
from .alibi import FEATURES, add_alibi, slope_parts
from .rotary import Rotary
from .shared_heads import local_shared_heads

CONTEXT = "context"
"""The mesh axis that shards rows."""


class Cache(NamedTuple):
    """Keys and values of the positions seen so far, for generation; by heads, so that no product transposes them."""

    k: Float[Array, "batch kv_heads length head_dim"]
    v: Float[Array, "batch kv_heads length head_dim"]


QKNormScope = Literal["head", "own_head", "all_heads", "unscaled"]
"""Scope of a norm of queries or keys: each head, with one scale for all; each head, with a scale of its own; all heads
together; or each head, without a scale."""


class HeadNorm(NamedTuple):
    """A norm of queries and keys with a separate scale for each head, or without any."""

    kind: Literal["rms", "layer"]
    epsilon: float
    scope: QKNormScope


class Chunks(NamedTuple):
    """Parts of equal length into which rows are cut for attention.

    Attributes:
        length: Number of positions of a chunk, counted from the first position of a document.
        most: The largest number of chunks in a row.
    """

    length: int
    most: int

    def segments(
        self, position: Int[Array, "batch seq"], segment: Int[Array, "batch seq"] | None
    ) -> Int[Array, "batch seq"]:
        """Return segments of which each is a chunk of a document; 0 stays padding.

        >>> Chunks(2, 3).segments(jnp.array([[0, 1, 2, 0, 0]]), jnp.array([[1, 1, 1, 2, 0]])).tolist()
        [[1, 1, 2, 4, 0]]
        """
        index = position // self.length + 1
        return index if segment is None else jnp.where(segment == 0, 0, (segment - 1) * self.most + index)


class Attention(Module):
    """Self-attention: project, normalize and rotate queries and keys, attend, project back.

    Attributes:
        causal: True if a position attends to itself and earlier ones only; otherwise to its whole row.
        window: A position attends to itself and the `window - 1` before it; None means all before it. Causal
            attention only.
        alibi: Slope of each head, by which scores grow with a key's position; none without.
        chunks: A position attends to itself and those before it in its chunk of the document; not with `window`.
        q_norm: Norm of each head's queries, as `k_norm` is of the keys, with a scale that all heads share.
        w_gate: Projection of the gate, a sigmoid by which the output is multiplied before it is projected back.
        head_norm: In place of these, a norm with the scales `q_scale` and `k_scale`.
        norm_after_rotary: Normalize after the rotation.
        clip: Bound to which projected queries, keys and values are clipped, before anything else.
        soft_cap: Bound of the scores, applied by a tanh (Gemma 2, arXiv:2408.00118).
        scale: Factor applied to the scores; None means `head_dim ** -0.5`.
        rotary: Rotary position embedding; None if positions are embedded elsewhere.
        sinks: A score of each head that takes part in every softmax without a value (gpt-oss).
    """

    q_norm: Norm | None
    k_norm: Norm | None
    rotary: Rotary | None = eqx.field(static=True)
    window: int | None = eqx.field(static=True)
    clip: float | None = eqx.field(static=True)
    soft_cap: float | None = eqx.field(static=True)
    scale: float | None = eqx.field(static=True)
    w_q: Float[Array, "embed heads head_dim"] = parameter(normal("embed"))
    w_k: Float[Array, "embed kv_heads head_dim"] = parameter(normal("embed"))
    w_v: Float[Array, "embed kv_heads head_dim"] = parameter(normal("embed"))
    w_o: Float[Array, "heads head_dim embed"] = parameter(normal("heads", "head_dim"))
    b_q: Float[Array, "heads head_dim"] | None = parameter(constant(0.0))
    b_k: Float[Array, "kv_heads head_dim"] | None = parameter(constant(0.0))
    b_v: Float[Array, "kv_heads head_dim"] | None = parameter(constant(0.0))
    b_o: Float[Array, " norm"] | None = parameter(constant(0.0))
    q_scale: Float[Array, "heads head_dim"] | None = parameter(None, default=None)
    k_scale: Float[Array, "kv_heads head_dim"] | None = parameter(None, default=None)
    sinks: Float[Array, " heads"] | None = parameter(None, default=None)
    w_gate: Float[Array, "embed heads head_dim"] | None = parameter(None, default=None)
    causal: bool = eqx.field(static=True, default=True)
    head_norm: HeadNorm | None = eqx.field(static=True, default=None)
    norm_after_rotary: bool = eqx.field(static=True, default=False)
    chunks: Chunks | None = eqx.field(static=True, default=None)
    alibi: tuple[float, ...] = eqx.field(static=True, default=())

    def __call__(
        self,
        x: Float[Array, "batch residual embed"],
        position: Int[Array, "batch seq"],
        segment: Int[Array, "batch seq"] | None,
        over_devices: ContextAttention = "auto",
    ) -> Float[Array, "batch residual embed"]:
        """Attend within the rows of `x`, and within equal segments if given (0 is padding).

        Args:
            over_devices: Attention algorithm for rows sharded over the context axis.
        """
        q, k, v, gate = self._project(x, position)
        k, v = local_shared_heads(q.shape[2], k, v)
        options = self._options(q.shape[-1])
        q, k, v = self._add_alibi(q, k, v, position)
        if self.chunks is not None:
            refuse_exact("chunked attention")
            segment = self.chunks.segments(position, segment)
        attended = attend(q, k, v, segment, over_devices, options)
        return self._output(checkpoint_name(attended, "attention"), gate)

    @property
    def exchange_requirement(self) -> AllToAllRequirement:
        return ulysses_requirement(self.w_q.shape[-2])

    def flops(self, length: int) -> float:
        """Count the FLOPs of one layer's forward matmuls per position, averaged over a row of `length`."""
        heads, head_dim = self.w_q.shape[-2:]
        matrices = (self.w_q, self.w_k, self.w_v, self.w_o, self.w_gate)
        weights = sum(math.prod(w.shape) for w in matrices if w is not None)
        if self.chunks is None:
            attended = mean_attended_positions(length, self.causal, self.window)
        else:
            attended = mean_attended_in_chunks(length, self.chunks.length)
        return 2.0 * (weights + 2 * heads * head_dim * attended)

    def empty_cache(self, batch: int, length: int, dtype: Any) -> Cache:
        """Create an empty cache of the keys and values that this device's heads use; stacked if the layers are."""
        *stacked, _, kv_heads, head_dim = self.w_k.shape
        (shared,) = local_shared_heads(self.w_q.shape[-2], jnp.zeros((1, 1, kv_heads)))
        width = head_dim + (FEATURES if self.alibi else 0)
        zeros = jnp.zeros((*stacked, batch, shared.shape[-1], length, width), dtype)
        return Cache(zeros, zeros)

    @property
    def cache_axes(self) -> Cache:
        """Logical axes of a cache. Its heads are split as queries are: each device has those that its queries use."""
        return Cache._make([("batch", "heads", None, None)] * 2)

    def extend(
        self,
        x: Float[Array, "batch seq embed"],
        position: Int[Array, "batch seq"],
        cache: Cache,
        start: Int[Array, " batch"],
    ) -> tuple[Float[Array, "batch seq embed"], Cache]:
        """Attend to the cached positions and to `x`, which occupies each row of the cache from its `start` on.

        Positions after a row's last one need no mask: later ones overwrite them before anything attends to them.
        """
        q, k, v, gate = self._project(x, position)
        k, v = local_shared_heads(q.shape[2], k, v)
        q, k, v = self._add_alibi(q, k, v, position)
        cache = Cache(
            write_positions(cache.k, k.swapaxes(1, 2), start, axis=1),
            write_positions(cache.v, v.swapaxes(1, 2), start, axis=1),
        )
        head_dim = self.w_q.shape[-1]
        options = self._options(head_dim)
        mask = MaskRule(causal=True, window=options.window)
        scores = ScoreRule(mask=mask, scale=self._scale(head_dim), soft_cap=options.soft_cap)
        chunk = None if self.chunks is None else self.chunks.length
        attended = cached_attention(q, CachedKeys(cache.k, cache.v, start, chunk), scores, options.sinks)
        return self._output(attended, gate), cache

    def _project(self, x: jax.Array, position: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array | None]:
        of_gate = ("batch seq embed, embed heads head_dim -> batch seq heads head_dim", self.w_gate)
        q, k, v, *gate = contract_gathered(
            x,
            ("batch seq embed, embed heads head_dim -> batch seq heads head_dim", self.w_q),
            ("batch seq embed, embed kv_heads head_dim -> batch seq kv_heads head_dim", self.w_k),
            ("batch seq embed, embed kv_heads head_dim -> batch seq kv_heads head_dim", self.w_v),
            *(() if self.w_gate is None else (of_gate,)),
        )
        if self.b_q is not None and self.b_k is not None and self.b_v is not None:
            q = add_bias(q, self.b_q, "heads head_dim")
            k = add_bias(k, self.b_k, "kv_heads head_dim")
            v = add_bias(v, self.b_v, "kv_heads head_dim")
        if self.clip is not None:
            q, k, v = (jnp.clip(x, -self.clip, self.clip) for x in (q, k, v))
        if not self.norm_after_rotary:
            q, k = self._normalize(q, k)
        if self.rotary is not None:
            q, k = self.rotary(q, position), self.rotary(k, position)
        if self.norm_after_rotary:
            q, k = self._normalize(q, k)
        q = q if self.rotary is None else self.rotary.grow_queries(q, position)
        return q, k, v, gate[0] if gate else None

    def _normalize(self, q: jax.Array, k: jax.Array) -> tuple[jax.Array, jax.Array]:
        if self.q_norm is not None and self.k_norm is not None:
            return self.q_norm(q), self.k_norm(k)
        if self.head_norm is not None:
            return normalize_heads(q, self.q_scale, "heads", *self.head_norm), normalize_heads(
                k, self.k_scale, "kv_heads", *self.head_norm
            )
        return q, k

    def _options(self, head_dim: int) -> AttentionOptions:
        sinks = None if self.sinks is None else gather(self.sinks, "heads", jnp.float32)
        # Additional features don't change the factor of scores.
        scale = self._scale(head_dim) if self.alibi else self.scale
        return AttentionOptions(self.causal, self.window, self.soft_cap, scale, sinks)

    def _scale(self, head_dim: int) -> float:
        return head_dim**-0.5 if self.scale is None else self.scale

    def _add_alibi(
        self, q: jax.Array, k: jax.Array, v: jax.Array, position: jax.Array
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        if not self.alibi:
            return q, k, v
        return add_alibi(q, k, v, position, slope_parts(self.alibi, self._scale(q.shape[-1])))

    def _output(self, attended: jax.Array, gate: jax.Array | None) -> jax.Array:
        attended = attended[..., :-FEATURES] if self.alibi else attended
        if gate is not None:
            attended = attended * jax.nn.sigmoid(gate.astype(jnp.float32)).astype(attended.dtype)
        out = contract("batch seq heads head_dim, heads head_dim embed -> batch seq embed", attended, self.w_o)
        return out if self.b_o is None else add_bias(out, self.b_o, "norm")


def normalize_heads(
    x: Float[Array, "batch seq heads head_dim"],
    scale: Any,
    axis: str,
    kind: Literal["rms", "layer"],
    epsilon: float,
    scope: QKNormScope,
) -> Float[Array, "batch seq heads head_dim"]:
    """Normalize queries or keys in float32, each head by itself or all of them together.

    Args:
        scale: A parameter with the axes `axis` and "head_dim", or None.
        axis: Logical axis of the heads; if the mesh splits it, the sums over all heads are its devices'.
    """
    layout = current_layout()
    split = () if layout is None or scope != "all_heads" else layout.compute((axis,))[0]
    dims = (-2, -1) if scope == "all_heads" else (-1,)

    def mean(values: jax.Array) -> jax.Array:
        local = values.mean(axis=dims, keepdims=True)
        if not split:
            return local
        summed: Any = psum_both(local, split)
        return summed / math.prod(axis_size(name) for name in split)

    y = x.astype(jnp.float32)
    if kind == "layer":
        y = y - mean(y)
    y = y * jax.lax.rsqrt(mean(y * y) + epsilon)
    return (y if scale is None else y * gather(scale, f"{axis} head_dim", jnp.float32)[None, None]).astype(x.dtype)


def attend(
    q: Float[Array, "batch seq heads head_dim"],
    k: Float[Array, "batch seq kv_heads head_dim"],
    v: Float[Array, "batch seq kv_heads head_dim"],
    segment: Int[Array, "batch seq"] | None,
    over_devices: ContextAttention,
    options: AttentionOptions,
) -> Float[Array, "batch seq heads head_dim"]:
    """Run the attention kernel on this device's heads, over whole rows."""
    size = axis_size(CONTEXT)
    if size == 1:
        return attention(q, k, v, segments=segment, target=current_target(), **options._asdict())
    return context_attention(q, k, v, segment, over_devices, options, axis=ContextAxis(CONTEXT, size, row_order()))


def ulysses_requirement(heads: int) -> AllToAllRequirement:
    """Return the mesh requirement of Ulysses attention."""
    what = "ulysses attention exchanges whole heads"
    return AllToAllRequirement(what, "heads", heads, CONTEXT, "tensor", "context_attention ring")


def mean_attended_positions(length: int, causal: bool, window: int | None) -> float:
    """Return the mean number of positions that a position of a row attends to.

    >>> mean_attended_positions(4, True, None), mean_attended_positions(4, True, 2), mean_attended_positions(4, False, None)
    (2.5, 1.75, 4.0)
    """
    if not causal:
        return float(length)
    width = min(window or length, length)
    # The first `width` positions attend to 1, 2, ..., `width` positions; each later one to `width`.
    return (width * (width + 1) / 2 + (length - width) * width) / length


def mean_attended_in_chunks(length: int, chunk: int) -> float:
    """Return the mean number of positions that a position of a row attends to, if rows are cut into chunks.

    >>> mean_attended_in_chunks(5, 2)
    1.4
    """
    whole, rest = divmod(length, chunk)
    return (whole * chunk * (chunk + 1) + rest * (rest + 1)) / (2 * length)


def write_positions(
    cache: Shaped[Array, "batch ..."], new: Shaped[Array, "batch ..."], start: Int[Array, " batch"], *, axis: int = 0
) -> Shaped[Array, "batch ..."]:
    """Write each row's new positions into the cache, from its `start` on.

    Args:
        axis: The axis of positions in a row.
    """

    def write(cache: jax.Array, new: jax.Array, start: jax.Array) -> jax.Array:
        return jax.lax.dynamic_update_slice_in_dim(cache, new, start, axis=axis)

    new = new.astype(cache.dtype)
    if cache.dtype != jnp.bfloat16:
        return jax.vmap(write)(cache, new, start)
    # As integers: XLA on CPU would convert the whole cache to float32 and back.
    as_bits = functools.partial(jax.lax.bitcast_convert_type, new_dtype=jnp.uint16)
    return jax.lax.bitcast_convert_type(jax.vmap(write)(as_bits(cache), as_bits(new), start), jnp.bfloat16)
