"""Log-probabilities of targets from hidden states, chunk by chunk, without the [tokens, vocab] logits.

Losses of whole answers (preferences, policy gradients) are functions of these. Their gradient is that of a
weighted cross-entropy: with the cotangent g of each log-probability,

    sum(g * log p) = cross-entropy with the weights -g,

so the backward pass is one call of `cross_entropy_sums_and_gradients`, which computes a chunk's logits again.
Saved for it are the hidden states and the head.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from panax.core.layout.target import Target
from panax.core.params.scopes import nan_for
from panax.kernels.cross_entropy import (
    CrossEntropySettings,
    choose_chunk_tokens,
    chunk_logits,
    cross_entropy_sums_and_gradients,
)
from panax.kernels.varying_axes import vary_alike

PLAIN = CrossEntropySettings()
"""A softmax over all rows of the head, without a cap."""


def linear_log_probabilities(
    x: Float[Array, "token embed"],
    head: Float[Array, "vocab embed"],
    targets: Int[Array, " token"],
    mask: Float[Array, " token"],
    settings: CrossEntropySettings = PLAIN,
    *,
    target: Target,
    chunk_tokens: int | None = None,
) -> Float[Array, " token"]:
    """Compute the log-probability of each target under the softmax of the logits `x @ head.T`, in float32;
    differentiable by `x` and `head`.

    Args:
        x: The last hidden states; matmuls are computed in this dtype with float32 accumulation.
        head: The unembedding, vocabulary first.
        targets: Token ids. Any value is valid if the mask is 0; otherwise an id outside the vocabulary makes
            the result NaN.
        mask: 0 for tokens without a log-probability: theirs is 0, and has no gradient.
        settings: The soft-cap and the vocabulary; a z-loss or label smoothing is an error.
        target: Hardware for which the program is compiled.
        chunk_tokens: Tokens per chunk; by default as many as fit the target's `logits_bytes`.

    Raises:
        ValueError: The settings have a z-loss or label smoothing.

    >>> x, head = jnp.zeros((2, 3)), jnp.zeros((4, 3))
    >>> targets, mask = jnp.array([1, 2]), jnp.array([1.0, 0.0])
    >>> [round(value, 4) for value in linear_log_probabilities(x, head, targets, mask, target=Target("cpu")).tolist()]
    [-1.3863, 0.0]
    """
    _check_settings(settings)
    chunk = choose_chunk_tokens(x, head, settings, target, chunk_tokens)
    x, head, targets, mask = vary_alike(x, head, targets, lax.stop_gradient(mask))
    return _log_probabilities(x, head, targets, mask, settings, target, chunk)


def log_probability_gradients(
    x: Float[Array, "token embed"],
    head: Float[Array, "vocab embed"],
    targets: Int[Array, " token"],
    cotangent: Float[Array, " token"],
    settings: CrossEntropySettings = PLAIN,
    *,
    target: Target,
    chunk_tokens: int | None = None,
) -> tuple[Float[Array, "token embed"], Float[Array, "vocab embed"]]:
    """Compute the gradients of `sum(cotangent * log-probability)` by `x` (in its dtype) and `head` (in
    float32).

    They are local, as those of `cross_entropy_sums_and_gradients`. Other arguments as in `linear_log_probabilities`.

    Args:
        cotangent: 0 for tokens without a log-probability.
    """
    weights = -cotangent.astype(jnp.float32)
    _, d_x, d_head = cross_entropy_sums_and_gradients(
        x, head, targets, weights, settings, target=target, chunk_tokens=chunk_tokens
    )
    return d_x, d_head


def _check_settings(settings: CrossEntropySettings) -> None:
    for name in ("z_loss", "label_smoothing"):
        if getattr(settings, name):
            raise ValueError(f"{name}={getattr(settings, name)}; a log-probability has none: set it to 0")


@functools.partial(jax.custom_vjp, nondiff_argnums=(4, 5, 6))
def _log_probabilities(
    x: Array,
    head: Array,
    targets: Array,
    mask: Array,
    settings: CrossEntropySettings,
    target: Target,
    chunk_tokens: int,
) -> Array:
    tokens = x.shape[0]
    chunks = -(-tokens // chunk_tokens)
    weights = head.astype(x.dtype)

    def chunked(array: Array) -> Array:
        widths = [(0, chunks * chunk_tokens - tokens)] + [(0, 0)] * (array.ndim - 1)
        return jnp.pad(array, widths).reshape(chunks, chunk_tokens, *array.shape[1:])

    if chunks == 1:
        return _chunk(x, targets, mask, weights, settings)

    def step(_: None, piece: tuple[Array, Array, Array]) -> tuple[None, Array]:
        x, targets, mask = piece
        return None, _chunk(x, targets, mask, weights, settings)

    _, values = lax.scan(step, None, (chunked(x), chunked(targets), chunked(mask)))
    return values.reshape(-1)[:tokens]


def _chunk(x: Array, targets: Array, mask: Array, weights: Array, settings: CrossEntropySettings) -> Array:
    """Return the log-probabilities of one chunk."""
    chunk = chunk_logits(x, weights, targets, settings)
    counted = mask != 0
    nan = nan_for(lambda: ~chunk.names_word & counted)
    value = jnp.where(chunk.names_word, chunk.target_logit - chunk.logsumexp, nan)
    value = jnp.where(counted, value, 0.0)
    axis = settings.vocab_axis
    varies = axis is not None and axis in jax.typeof(value).manual_axis_type.varying
    return lax.pmean(value, axis) if varies else value


def _forward(
    x: Array, head: Array, targets: Array, mask: Array, settings: Any, target: Target, chunk_tokens: int
) -> Any:
    value = _log_probabilities(x, head, targets, mask, settings, target, chunk_tokens)
    return value, (x, head, targets, mask)


def _backward(settings: Any, target: Target, chunk_tokens: int, saved: Any, cotangent: Array) -> Any:
    x, head, targets, mask = saved
    counted = jnp.where(mask != 0, cotangent, 0.0)
    d_x, d_head = log_probability_gradients(
        x, head, targets, counted, settings, target=target, chunk_tokens=chunk_tokens
    )
    return d_x, d_head.astype(head.dtype), None, None


_log_probabilities.defvjp(_forward, _backward)
