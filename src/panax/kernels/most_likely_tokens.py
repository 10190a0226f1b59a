"""The k most likely tokens of each position, chunk by chunk, without the [tokens, vocab] logits; not differentiated."""

from typing import NamedTuple

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from panax.core.layout.target import Target
from panax.kernels.cross_entropy import choose_chunk_tokens, chunk_logits
from panax.kernels.top_log_probabilities import TopSettings
from panax.kernels.varying_axes import vary_alike


class MostLikelyTokens(NamedTuple):
    """The most likely tokens, in descending order.

    Attributes:
        ids: Token ids.
        log_probabilities: Theirs, at the temperature, in float32.
    """

    ids: Int[Array, "token k"]
    log_probabilities: Float[Array, "token k"]


def most_likely_tokens(
    x: Float[Array, "token embed"],
    head: Float[Array, "vocab embed"],
    k: int,
    settings: TopSettings,
    *,
    target: Target,
) -> MostLikelyTokens:
    """Find the k most likely tokens under the softmax of `x @ head.T`.

    With a split vocabulary, each device contributes the best k of its columns, and all devices get the same result.

    Args:
        k: At most the size of the vocabulary.

    >>> x, head = jnp.ones((1, 1)), jnp.log(jnp.array([[0.2], [0.5], [0.3]]))
    >>> found = most_likely_tokens(x, head, 2, TopSettings(), target=Target("cpu"))
    >>> found.ids.tolist(), [round(float(p), 3) for p in jnp.exp(found.log_probabilities[0])]
    ([[1, 2]], [0.5, 0.3])
    """
    x, head = vary_alike(x, head)
    weights = head.astype(x.dtype)
    chunk = choose_chunk_tokens(x, head, settings.vocabulary, target, settings.chunk_tokens)
    chunks = -(-x.shape[0] // chunk)
    padded = jnp.pad(x, ((0, chunks * chunk - x.shape[0]), (0, 0))).reshape(chunks, chunk, x.shape[1])
    pieces = lax.map(lambda piece: _chunk(piece, weights, k, settings), padded)
    return MostLikelyTokens(*(leaf.reshape(-1, k)[: x.shape[0]] for leaf in pieces))


def _chunk(x: Array, weights: Array, k: int, settings: TopSettings) -> MostLikelyTokens:
    axis, rows = settings.vocabulary.vocab_axis, weights.shape[0]
    plain = chunk_logits(x, weights, jnp.zeros(x.shape[0], jnp.int32), settings.vocabulary)
    scaled, highest = plain.logits / settings.temperature, plain.highest / settings.temperature
    logsumexp = highest + jnp.log(plain.total_of(jnp.exp(scaled - highest[:, None]).sum(axis=-1)))
    logits, ids = lax.top_k(scaled, min(k, rows))
    if axis is not None:
        ids += lax.axis_index(axis) * rows
        logits, ids = (lax.all_gather(leaf, axis, axis=1, tiled=True) for leaf in (logits, ids))
        logits, order = lax.top_k(logits, k)
        ids = jnp.take_along_axis(ids, order, axis=1)
    return MostLikelyTokens(ids, logits - logsumexp[:, None])
