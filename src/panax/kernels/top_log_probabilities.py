"""Log-probabilities of k given ids per token, and of all others together, without the [tokens, vocab] logits.

A teacher that is known by its best k tokens is compared with the model by these: with z the logits divided by the
temperature, and K the ids of a token,

    s_i  = z_i - logsumexp(z)                          for i in K
    tail = logsumexp(z_j, j not in K) - logsumexp(z)

The tail is a sum of its own, not 1 minus the others, so that it is exact however small it is. Of the cotangents g the
gradient by the logits is, with q the softmax of z and r the softmax over the tail alone,

    dz_j = sum_i g_i (1[j = i] - q_j) + g_tail (r_j - q_j)

The backward pass computes a chunk's logits again; saved are the hidden states and the head.
"""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from panax.core.layout.target import Target
from panax.core.params.scopes import nan_for
from panax.kernels.attention.mask import MASKED
from panax.kernels.cross_entropy import ChunkLogits, CrossEntropySettings, choose_chunk_tokens, chunk_logits
from panax.kernels.precision import accumulation_dtype
from panax.kernels.row_functions import named_logsumexp
from panax.kernels.varying_axes import vary_alike, vary_like


class TopLogProbabilities(NamedTuple):
    """Log-probabilities of each token's k ids, of all other ids together, and of the target; 0 if the mask is 0.

    Attributes:
        top: At the temperature.
        tail: At the temperature; -inf if there are no other ids.
        target: At temperature 1.
    """

    top: Float[Array, "token k"]
    tail: Float[Array, " token"]
    target: Float[Array, " token"]


class TopInputs(NamedTuple):
    """Hidden states, and the ids to compute log-probabilities of.

    Attributes:
        x: The last hidden states; matmuls are computed in this dtype with float32 accumulation.
        ids: Distinct token ids.
        targets: Ids of the tokens that follow.
        mask: 0 for tokens without log-probabilities; their ids and targets may have any value.
    """

    x: Float[Array, "token embed"]
    ids: Int[Array, "token k"]
    targets: Int[Array, " token"]
    mask: Float[Array, " token"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class TopSettings:
    """Settings of the log-probabilities.

    Attributes:
        vocabulary: The soft-cap and the vocabulary; a z-loss or label smoothing is an error.
        temperature: Divisor of the logits, for `top` and `tail`.
        chunk_tokens: Tokens per chunk; by default as many as fit the target's `logits_bytes`.
    """

    vocabulary: CrossEntropySettings = CrossEntropySettings()  # noqa: RUF009
    temperature: float = 1.0
    chunk_tokens: int | None = None

    def __post_init__(self) -> None:
        for name in ("z_loss", "label_smoothing"):
            if getattr(self.vocabulary, name):
                raise ValueError(f"{name}={getattr(self.vocabulary, name)}; a log-probability has none: set it to 0")
        if not self.temperature > 0.0:
            raise ValueError(f"temperature={self.temperature}; expected a positive number")


def top_log_probabilities(
    inputs: TopInputs, head: Float[Array, "vocab embed"], settings: TopSettings, *, target: Target
) -> TopLogProbabilities:
    """Compute the log-probabilities of given ids under the softmax of `x @ head.T`, in float32.

    Not differentiable; its gradients are those of `top_log_probability_gradients`. An id outside of the vocabulary, or one
    that is given twice, makes the result NaN if the mask is not 0.

    Args:
        head: The unembedding, vocabulary first; the local shard if `settings.vocabulary` has a `vocab_axis`.
        target: Hardware for which the program is compiled.

    >>> x, head = jnp.zeros((1, 3)), jnp.zeros((4, 3))
    >>> asked = TopInputs(x, jnp.array([[1, 3]]), jnp.array([0]), jnp.ones(1))
    >>> found = top_log_probabilities(asked, head, TopSettings(), target=Target("cpu"))
    >>> [round(float(jnp.exp(value).sum()), 4) for value in found]
    [0.5, 0.5, 0.25]
    """
    inputs, head = _alike(inputs, head)
    weights = head.astype(inputs.x.dtype)

    def step(carry: None, piece: TopInputs) -> tuple[None, TopLogProbabilities]:
        return carry, _values(_Chunk.of(piece, weights, settings), piece, settings)

    return _over_chunks(step, None, inputs, head, settings, target)[1]


def top_log_probability_gradients(
    inputs: TopInputs,
    head: Float[Array, "vocab embed"],
    cotangent: TopLogProbabilities,
    settings: TopSettings,
    *,
    target: Target,
) -> tuple[Float[Array, "token embed"], Float[Array, "vocab embed"]]:
    """Compute the gradients of the cotangent's product with `top_log_probabilities`, by `x` (in its dtype) and `head` (in
    float32).

    They are local, as those of `cross_entropy_sums_and_gradients`. Other arguments as in `top_log_probabilities`.
    """
    inputs, head = _alike(inputs, head)
    x = inputs.x
    wide = accumulation_dtype(x.dtype)
    weights = head.astype(x.dtype)
    counted = inputs.mask != 0
    cotangent = TopLogProbabilities(*(jnp.where(_like(counted, leaf), leaf, 0.0).astype(wide) for leaf in cotangent))

    def step(d_head: Array, piece: tuple[TopInputs, TopLogProbabilities]) -> tuple[Array, Array]:
        asked, gradient = piece
        d_logits = _logit_gradients(_Chunk.of(asked, weights, settings), gradient, settings).astype(x.dtype)
        # c token of the chunk, v vocabulary, e embed
        d_x = jnp.einsum("cv,ve->ce", d_logits, weights, preferred_element_type=wide)
        # As in `cross_entropy.py`, a barrier keeps the transposition out of the matmul.
        d_head += jnp.einsum("ec,cv->ev", lax.optimization_barrier(asked.x.T), d_logits, preferred_element_type=wide)
        return d_head, d_x.astype(x.dtype)

    zero = vary_like(jnp.zeros((x.shape[1], head.shape[0]), wide), x)
    d_head, d_x = _over_chunks(step, zero, (inputs, cotangent), head, settings, target)
    return d_x, lax.optimization_barrier(d_head).T


class _Chunk(NamedTuple):
    """The logits of a chunk, c tokens by v columns of this device's vocabulary, at both temperatures.

    Attributes:
        local: Index of each id among this device's columns; v for those of other devices.
        scaled: Logits divided by the temperature.
        logsumexp: Of `scaled`, over the whole vocabulary.
        others: `scaled`, with the given ids masked.
        tail: Logarithm of the sum over `others`; -inf if there are none.
        valid: True if the ids are distinct, and in the vocabulary.
    """

    plain: ChunkLogits
    local: Int[Array, "c k"]
    scaled: Float[Array, "c v"]
    logsumexp: Float[Array, " c"]
    others: Float[Array, "c v"]
    tail: Float[Array, " c"]
    valid: Bool[Array, " c"]

    @classmethod
    def of(cls, asked: TopInputs, weights: Array, settings: TopSettings) -> "_Chunk":
        axis = settings.vocabulary.vocab_axis
        plain = chunk_logits(asked.x, weights, asked.targets, settings.vocabulary)
        rows, ids = weights.shape[0], asked.ids.astype(jnp.int32)
        local = ids if axis is None else ids - lax.axis_index(axis) * rows
        in_vocabulary = (ids >= 0) & (ids < plain.vocab_size)
        local = jnp.where(in_vocabulary & (local >= 0) & (local < rows), local, rows)
        scaled, logsumexp = plain.logits, plain.logsumexp
        if settings.temperature != 1.0:
            scaled = plain.logits / settings.temperature
            highest = plain.highest / settings.temperature
            exact = named_logsumexp(scaled, plain.vocab_size) if axis is None else None
            total = plain.total_of(jnp.exp(scaled - highest[:, None]).sum(axis=-1))
            logsumexp = highest + jnp.log(total) if exact is None else exact
        count = _add_at(vary_like(jnp.zeros(scaled.shape, jnp.int32), scaled), local, jnp.ones_like(local))
        is_listed = count > 0
        real = ~is_listed if plain.real is None else ~is_listed & plain.real
        others = jnp.where(real, scaled, MASKED)
        highest = others.max(axis=-1)
        highest = highest if axis is None else lax.pmax(highest, axis)
        total = plain.total_of(jnp.where(real, jnp.exp(others - highest[:, None]), 0.0).sum(axis=-1))
        empty = total == 0.0
        tail = jnp.where(empty, -jnp.inf, highest + jnp.log(jnp.where(empty, 1.0, total)))
        num_ids = plain.total_of(is_listed.astype(jnp.int32).sum(axis=-1))
        return cls(plain, local, scaled, logsumexp, others, tail, num_ids == ids.shape[1])


def _values(chunk: _Chunk, asked: TopInputs, settings: TopSettings) -> TopLogProbabilities:
    plain, columns = chunk.plain, chunk.scaled.shape[1]
    here = jnp.take_along_axis(chunk.scaled, jnp.minimum(chunk.local, columns - 1), axis=1)
    top = plain.total_of(jnp.where(chunk.local < columns, here, 0.0)) - chunk.logsumexp[:, None]
    counted = asked.mask != 0
    nan = nan_for(lambda: ~(chunk.valid & plain.names_word) & counted)
    values = TopLogProbabilities(
        jnp.where(chunk.valid[:, None], top, nan),
        jnp.where(chunk.valid, chunk.tail - chunk.logsumexp, nan),
        jnp.where(plain.names_word, plain.target_logit - plain.logsumexp, nan),
    )
    axis = settings.vocabulary.vocab_axis

    def agree(value: Array) -> Array:
        value = jnp.where(_like(counted, value), value, 0.0)
        varies = axis is not None and axis in jax.typeof(value).manual_axis_type.varying
        # The tail may be -inf, of which a mean is NaN.
        return lax.pmax(value, axis) if varies else value

    return TopLogProbabilities(*map(agree, values))


def _logit_gradients(chunk: _Chunk, gradient: TopLogProbabilities, settings: TopSettings) -> Float[Array, "c v"]:
    """Return the gradient by the logits `x @ weights.T` of this device's columns."""
    plain = chunk.plain
    no_tail = jnp.isneginf(chunk.tail)
    g_tail = jnp.where(no_tail, 0.0, gradient.tail)
    softmax = jnp.exp(chunk.scaled - chunk.logsumexp[:, None])
    # Masked columns underflow to 0.
    of_tail = jnp.exp(chunk.others - jnp.where(no_tail, 0.0, chunk.tail)[:, None])
    d_scaled = g_tail[:, None] * of_tail - (gradient.top.sum(axis=-1) + g_tail)[:, None] * softmax
    d_scaled = _add_at(d_scaled, chunk.local, gradient.top)
    d_logits = d_scaled / settings.temperature
    of_target = jnp.exp(plain.logits - plain.logsumexp[:, None])
    d_logits += gradient.target[:, None] * (plain.is_target.astype(of_target.dtype) - of_target)
    return d_logits if plain.slope is None else d_logits * plain.slope


def _over_chunks(
    step: Any, carry: Any, pieces: Any, head: Array, settings: TopSettings, target: Target
) -> tuple[Any, Any]:
    """Run `step` over chunks of tokens; return its last carry, and its results for all tokens."""
    first: TopInputs = pieces if isinstance(pieces, TopInputs) else pieces[0]
    tokens = first.x.shape[0]
    chunk = choose_chunk_tokens(first.x, head, settings.vocabulary, target, settings.chunk_tokens)
    chunks = -(-tokens // chunk)
    if chunks == 1:
        return step(carry, pieces)

    def chunked(array: Array) -> Array:
        widths = [(0, chunks * chunk - tokens)] + [(0, 0)] * (array.ndim - 1)
        return jnp.pad(array, widths).reshape(chunks, chunk, *array.shape[1:])

    carry, results = lax.scan(step, carry, jax.tree.map(chunked, pieces))
    return carry, jax.tree.map(lambda leaf: leaf.reshape(-1, *leaf.shape[2:])[:tokens], results)


def _alike(inputs: TopInputs, head: Array) -> tuple[TopInputs, Array]:
    *leaves, head = vary_alike(*inputs, head)
    return TopInputs(*leaves), head


def _like(counted: Array, leaf: Array) -> Array:
    return counted.reshape(*counted.shape, *(1,) * (leaf.ndim - counted.ndim))


@jax.vmap
def _add_at(row: Array, columns: Array, values: Array) -> Array:
    """Add values to a token's columns; those of index v are dropped."""
    return row.at[columns].add(values, mode="drop")
