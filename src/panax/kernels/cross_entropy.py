"""Chunked cross-entropy of a linear head, which never materializes the full [tokens, vocab] logits.

With a vocabulary of 128 k and 32 k tokens the logits of one step would be 16 GiB, and their gradient the same
again. Here a scan walks chunks of tokens. It computes a chunk's logits, their loss, and immediately their
gradient: three matmuls, none of them computed twice. The gradients are per unit of the loss sum, so that they
can be computed before the divisor of the sum is known; the backward pass scales them.

Source: the idea of fusing the head with its loss: Liger Kernel (arXiv:2410.10989), section 3.2; z-loss: PaLM
(arXiv:2204.02311), section 5; soft-cap: Gemma 2 (arXiv:2408.00118), section 2.

On the CPU the three matmuls are written rows-by-columns, which XLA:CPU runs up to 8 times faster than other
contractions in bfloat16: the gradient of the head is therefore accumulated as [embed, vocab] and transposed
once.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from panax.core.layout.target import Target
from panax.core.params.scopes import nan_for
from panax.kernels.attention.mask import MASKED
from panax.kernels.precision import accumulation_dtype
from panax.kernels.product import materialize, product
from panax.kernels.registry import is_exact, refuse_exact
from panax.kernels.row_functions import named_logsumexp
from panax.kernels.varying_axes import vary_alike, vary_like


class CrossEntropySums(NamedTuple):
    """Masked sums over tokens, float32. Divide by the global weight once, after summing over devices.

    Attributes:
        loss_sum: The minimized sum: cross-entropy (with label smoothing, if set) and z-loss.
        weight: The sum of the mask.
        correct_sum: Number of tokens for which the target has the highest logit; ties do not count.
        z_loss_sum: The part of `loss_sum` that is z-loss.
    """

    loss_sum: Float[Array, ""]
    weight: Float[Array, ""]
    correct_sum: Float[Array, ""]
    z_loss_sum: Float[Array, ""]


@dataclasses.dataclass(frozen=True, kw_only=True)
class CrossEntropySettings:
    """The terms of a softmax cross-entropy, and the vocabulary that it covers.

    Attributes:
        soft_cap: Bounds logits to (-soft_cap, soft_cap) by a scaled tanh.
        z_loss: Coefficient of the squared logarithm of the softmax sum.
        label_smoothing: Share of the target's probability that is spread uniformly over the vocabulary.
        vocab_size: Columns from this index on are vocabulary padding and get probability 0.
        vocab_axis: Mesh axis over which the vocabulary is sharded; the head is then the local shard, and the
            call must be inside `shard_map`. The sums cover the whole vocabulary and are equal along the axis.
    """

    soft_cap: float | None = None
    z_loss: float = 0.0
    label_smoothing: float = 0.0
    vocab_size: int | None = None
    vocab_axis: str | None = None

    def __post_init__(self) -> None:
        if not 0.0 <= self.label_smoothing < 1.0:
            raise ValueError(f"label_smoothing={self.label_smoothing} must be at least 0 and below 1")


def chunk_tokens_within(budget_bytes: int, *, tokens: int, vocab: int) -> int:
    """Return the number of tokens per chunk such that its float32 logits fit the budget: equal chunks of at
    least one token.

    >>> chunk_tokens_within(2**29, tokens=32_768, vocab=128_000)
    1024
    >>> chunk_tokens_within(2**29, tokens=1_000, vocab=128_000)
    1000
    """
    max_tokens = max(1, min(tokens, budget_bytes // (4 * vocab)))
    even = -(-tokens // -(-tokens // max_tokens))
    return min(max_tokens, -(-even // 8) * 8)


def linear_cross_entropy(
    x: Float[Array, "token embed"],
    head: Float[Array, "vocab embed"],
    targets: Int[Array, " token"],
    mask: Float[Array, " token"],
    settings: CrossEntropySettings = CrossEntropySettings(),
    *,
    target: Target,
    chunk_tokens: int | None = None,
) -> CrossEntropySums:
    """Compute the loss of predicting `targets` from the logits `x @ head.T`; differentiable through
    `loss_sum`.

    Only `loss_sum` has a gradient, with respect to `x` and `head`. Under differentiation, the gradients are
    computed together with the loss, chunk by chunk, and stored as residuals (x's bytes, and the head's size
    in float32) instead of the logits.

    Args:
        x: The last hidden states; matmuls are computed in this dtype with float32 accumulation.
        head: The unembedding, vocabulary first, as a tied embedding is stored; may be float32 while `x` is
            bfloat16.
        targets: Token ids. Any value is valid if the mask is 0; otherwise an id outside the vocabulary makes
            the loss NaN.
        mask: The weight of each token, not necessarily 0 or 1; a constant, without gradient.
        target: Hardware for which the program is compiled.
        chunk_tokens: Tokens per chunk; by default as many as fit the target's `logits_bytes`.
    """
    chunk = choose_chunk_tokens(x, head, settings, target, chunk_tokens)
    mask = lax.stop_gradient(mask)
    x, head, targets, mask = vary_alike(x, head, targets, mask)
    result: tuple[Array, tuple[Array, Array, Array]] = _linear_cross_entropy(x, head, targets, mask, settings, chunk)
    loss_sum, rest = result
    return CrossEntropySums(loss_sum, *lax.stop_gradient(rest))


@functools.partial(jax.custom_vjp, nondiff_argnums=(4, 5))
def _linear_cross_entropy(
    x: Array, head: Array, targets: Array, mask: Array, settings: CrossEntropySettings, chunk: int
):
    sums, _ = _walk(x, head, targets, mask, settings, chunk, gradients=False)
    return sums.loss_sum, sums[1:]


def _forward(x, head, targets, mask, settings, chunk):
    sums, gradients = _walk(x, head, targets, mask, settings, chunk, gradients=True)
    # Only the dtypes of x and head are needed: empty arrays carry them.
    return (sums.loss_sum, sums[1:]), (gradients, x[:0], head[:0])


def _backward(settings, chunk, saved, cotangents):
    (d_x, d_head), like_x, like_head = saved
    scale = cotangents[0]
    return (d_x.astype(scale.dtype) * scale).astype(like_x.dtype), (d_head * scale).astype(like_head.dtype), None, None


_linear_cross_entropy.defvjp(_forward, _backward)


def cross_entropy_sums(
    x: Float[Array, "token embed"],
    head: Float[Array, "vocab embed"],
    targets: Int[Array, " token"],
    mask: Float[Array, " token"],
    settings: CrossEntropySettings = CrossEntropySettings(),
    *,
    target: Target,
    chunk_tokens: int | None = None,
) -> CrossEntropySums:
    """Compute the sums only, with one matmul per chunk, for evaluation. Arguments as in
    `linear_cross_entropy`.
    """
    chunk = choose_chunk_tokens(x, head, settings, target, chunk_tokens)
    x, head, targets, mask = vary_alike(x, head, targets, mask)
    return _walk(x, head, targets, mask, settings, chunk, gradients=False)[0]


def cross_entropy_sums_and_gradients(
    x: Float[Array, "token embed"],
    head: Float[Array, "vocab embed"],
    targets: Int[Array, " token"],
    mask: Float[Array, " token"],
    settings: CrossEntropySettings = CrossEntropySettings(),
    *,
    target: Target,
    chunk_tokens: int | None = None,
) -> tuple[CrossEntropySums, Float[Array, "token embed"], Float[Array, "vocab embed"]]:
    """Compute the sums and the gradients of `loss_sum` with respect to `x` (in its dtype) and `head` (in
    float32).

    The gradients are local: with tokens sharded over devices, the caller sums the head's gradient over them;
    with a sharded vocabulary, it sums x's gradient over `vocab_axis`. Arguments as in `linear_cross_entropy`.
    """
    chunk = choose_chunk_tokens(x, head, settings, target, chunk_tokens)
    x, head, targets, mask = vary_alike(x, head, targets, mask)
    sums, gradients = _walk(x, head, targets, mask, settings, chunk, gradients=True)
    d_x, d_head = gradients
    return sums, d_x, d_head


def choose_chunk_tokens(
    x: Array, head: Array, settings: CrossEntropySettings, target: Target, chunk_tokens: int | None
) -> int:
    """Return the number of tokens per chunk, after checking the settings against the head."""
    vocab_size = settings.vocab_size
    if chunk_tokens is not None and chunk_tokens < 1:
        raise ValueError(f"chunk_tokens={chunk_tokens} must be at least 1")
    if vocab_size is not None and settings.vocab_axis is None and not 0 < vocab_size <= head.shape[0]:
        raise ValueError(f"vocab_size={vocab_size} must be between 1 and the head's {head.shape[0]} rows")
    if chunk_tokens is None:
        chunk_tokens = chunk_tokens_within(target.traits.logits_bytes, tokens=x.shape[0], vocab=head.shape[0])
    return min(chunk_tokens, x.shape[0])


def _walk(
    x: Array,
    head: Array,
    targets: Array,
    mask: Array,
    settings: CrossEntropySettings,
    chunk_tokens: int,
    *,
    gradients: bool,
) -> tuple[CrossEntropySums, Any]:
    """Loop over the chunks; return the sums, and the pair of gradients or None."""
    tokens, embed = x.shape
    chunks = -(-tokens // chunk_tokens)
    padding = chunks * chunk_tokens - tokens
    wide = accumulation_dtype(x.dtype)
    weights = head.astype(x.dtype)

    def chunked(array: Array) -> Array:
        widths = [(0, padding)] + [(0, 0)] * (array.ndim - 1)
        return jnp.pad(array, widths).reshape(chunks, chunk_tokens, *array.shape[1:])

    x_chunks = chunked(x)
    pieces = [x_chunks, chunked(targets), chunked(mask.astype(wide))]
    if gradients:
        # Without the barrier XLA folds the transposition into the matmul, which is then several times slower.
        pieces.append(lax.optimization_barrier(x_chunks.swapaxes(1, 2)))

    def step(carry, piece):
        sums, d_head_t = carry
        x_chunk, target, weight = piece[:3]
        chunk_sums, d_logits = _chunk(x_chunk, weights, target, weight, settings, gradients=gradients)
        sums = CrossEntropySums(*(total + part for total, part in zip(sums, chunk_sums)))
        if not gradients:
            return (sums, d_head_t), None
        # c token of the chunk, v vocabulary, e embed
        d_x = jnp.einsum("cv,ve->ce", d_logits, weights, preferred_element_type=wide)
        d_head_t += jnp.einsum("ec,cv->ev", piece[3], d_logits, preferred_element_type=wide)
        return (sums, d_head_t), d_x.astype(x.dtype)

    zero = jnp.zeros((), wide)
    sums = CrossEntropySums(zero, zero, zero, zero)
    # A sum over the vocabulary's axis is equal along it; only the gradients still differ.
    sums = jax.tree.map(lambda part: _vary_as_sums(part, x, settings), sums)
    d_head_t = vary_like(jnp.zeros((embed, head.shape[0]) if gradients else (0, 0), wide), x)
    if chunks == 1:
        (sums, d_head_t), d_x = step((sums, d_head_t), [piece[0] for piece in pieces])
        d_x = None if d_x is None else d_x[None]
    else:
        (sums, d_head_t), d_x = lax.scan(step, (sums, d_head_t), pieces)
    if d_x is None:
        return sums, None
    # Without the barrier XLA folds this transposition into the matmul too, into a form that XLA:CPU of jax
    # 0.10.2 fails to run in bfloat16 ("Unsupported element type for DotThunk::Execute").
    return sums, (d_x.reshape(-1, embed)[:tokens], lax.optimization_barrier(d_head_t).T)


def _vary_as_sums(zero: Array, x: Array, settings: CrossEntropySettings) -> Array:
    zero = vary_like(zero, x)
    return zero if settings.vocab_axis is None else lax.pmax(zero, settings.vocab_axis)


class ChunkLogits(NamedTuple):
    """The logits of a chunk, c tokens by v columns of this device's vocabulary, and their softmax.

    Attributes:
        logits: Capped; padding of the vocabulary is masked.
        slope: Derivative of the cap; None without one.
        real: True for columns that are not padding of the vocabulary; None if all are.
        highest: The highest logit of each token.
        exponential: `exp(logits - highest)`.
        total: Sum of the exponentials over the whole vocabulary.
        logsumexp: Logarithm of the softmax's sum.
        is_target: True in the column of the target.
        target_logit: The target's logit; 0 for a target outside of the vocabulary.
        ties: Number of logits that are the highest.
        names_word: True if the target is in the vocabulary.
        vocab_size: Size of the whole vocabulary.
        total_of: Sum of a value over the devices that split the vocabulary.
    """

    logits: Array
    slope: Array | None
    real: Array | None
    highest: Array
    exponential: Array
    total: Array
    logsumexp: Array
    is_target: Array
    target_logit: Array
    ties: Array
    names_word: Array
    vocab_size: int
    total_of: Callable[[Array], Array]


def chunk_logits(x: Array, weights: Array, target: Array, settings: CrossEntropySettings) -> ChunkLogits:
    """Compute the logits `x @ weights.T` of one chunk."""
    wide = accumulation_dtype(x.dtype)
    if settings.vocab_axis is not None:
        refuse_exact("a vocabulary that is split over devices")
    total_of = functools.partial(lax.psum, axis_name=settings.vocab_axis) if settings.vocab_axis else lambda part: part
    rows = weights.shape[0]
    shards = 1 if settings.vocab_axis is None else lax.axis_size(settings.vocab_axis)
    offset = 0 if settings.vocab_axis is None else lax.axis_index(settings.vocab_axis) * rows
    # In a narrow type indices would wrap around: row 257 is row 1 in uint8.
    target = target.astype(jnp.int32)
    column = (jnp.arange(rows, dtype=jnp.int32) + jnp.asarray(offset, jnp.int32))[None, :]
    vocab_size = rows * shards if settings.vocab_size is None else settings.vocab_size
    real = None if settings.vocab_size is None else column < vocab_size

    if is_exact():
        raw = product("ce,ve->cv", x, weights, wide)
    else:
        raw = jnp.einsum("ce,ve->cv", x, weights, preferred_element_type=wide)
    slope = None
    logits = raw
    if settings.soft_cap is not None:
        bounded = jnp.tanh(raw / settings.soft_cap)
        logits, slope = materialize(settings.soft_cap * bounded), 1.0 - bounded * bounded
    if real is not None:
        logits = jnp.where(real, logits, MASKED)

    highest = logits.max(axis=-1)
    if settings.vocab_axis is not None:
        highest = lax.pmax(highest, settings.vocab_axis)
    # The barrier prevents XLA from computing the exponential twice, once for the sum and once for the
    # gradient.
    exponential = lax.optimization_barrier(jnp.exp(logits - highest[:, None]))
    total = total_of(exponential.sum(axis=-1))
    exact = named_logsumexp(logits, vocab_size) if settings.vocab_axis is None else None
    logsumexp = highest + jnp.log(total) if exact is None else exact
    is_target = column == target[:, None]
    # Combined, for one sum over the vocabulary's axis: the target's logit, and the number of logits that are
    # the highest.
    target_logit, ties = total_of(
        jnp.stack(
            [jnp.where(is_target, logits, 0.0).sum(axis=-1), (logits >= highest[:, None]).astype(wide).sum(axis=-1)]
        )
    )
    names_word = (target >= 0) & (target < vocab_size)
    return ChunkLogits(
        logits, slope, real, highest, exponential, total, logsumexp, is_target, target_logit, ties, names_word, vocab_size,
        total_of,
    )  # fmt: skip


def _chunk(x: Array, weights: Array, target: Array, weight: Array, settings: CrossEntropySettings, *, gradients: bool):
    """Return the sums of one chunk, and the gradient of its loss sum by the logits `x @ weights.T`, in x's
    dtype.
    """
    wide = weight.dtype
    chunk = chunk_logits(x, weights, target, settings)
    real, logsumexp, vocab_size = chunk.real, chunk.logsumexp, chunk.vocab_size

    smoothing = settings.label_smoothing
    # A target outside the vocabulary has no logit. Its loss is NaN if unmasked, so that the update is
    # skipped.
    nan = nan_for(lambda: ~chunk.names_word & (weight != 0))
    target_logit = jnp.where(chunk.names_word, chunk.target_logit, jnp.where(weight == 0, 0.0, nan))
    loss = logsumexp - (1.0 - smoothing) * target_logit
    if smoothing:
        real_logits = chunk.logits if real is None else jnp.where(real, chunk.logits, 0.0)
        loss -= smoothing / vocab_size * chunk.total_of(real_logits.sum(axis=-1))
    z_loss_sum = settings.z_loss * (weight * logsumexp * logsumexp).sum()
    # Ties count as wrong, so that a model with constant logits scores no accuracy.
    correct = ((target_logit >= chunk.highest) & (chunk.ties == 1)).astype(wide)
    sums = CrossEntropySums((weight * loss).sum() + z_loss_sum, weight.sum(), (weight * correct).sum(), z_loss_sum)
    if settings.vocab_axis is not None:
        sums = CrossEntropySums(
            *(lax.pmean(part, settings.vocab_axis) if _varies(part, settings) else part for part in sums)
        )
    if not gradients:
        return sums, None

    factor = weight * (1.0 + 2.0 * settings.z_loss * logsumexp) / chunk.total
    d_logits = chunk.exponential * factor[:, None] - jnp.where(
        chunk.is_target, (1.0 - smoothing) * weight[:, None], 0.0
    )
    if smoothing:
        even = (smoothing / vocab_size) * weight[:, None]
        d_logits -= even if real is None else jnp.where(real, even, 0.0)
    d_raw = d_logits if chunk.slope is None else d_logits * chunk.slope
    return sums, d_raw.astype(x.dtype)


def _varies(part: Array, settings: CrossEntropySettings) -> bool:
    return settings.vocab_axis in jax.typeof(part).manual_axis_type.varying
