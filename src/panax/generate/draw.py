"""Drawing of tokens from logits, each row by its own settings."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, UInt32

from ..kernels.kept_tokens import kept_log_softmax
from ..kernels.row_functions import log_softmax
from .sampling import MAX_TOP_LOG_PROBABILITIES

WORD_BITS = 32


class AllowedTokens(NamedTuple):
    """Tokens that may be drawn under the constraint of each row.

    Attributes:
        constrained: False for rows in which all may be.
        bits: A bit for each token, the lowest first.
    """

    constrained: Bool[Array, " rows"]
    bits: UInt32[Array, "rows words"]


class RowSettings(NamedTuple):
    """The numbers of `Sampling`, for each row.

    Attributes:
        drawn_before: Number of tokens that the row has drawn before.
    """

    temperature: Float[Array, " rows"]
    top_k: Int[Array, " rows"]
    top_p: Float[Array, " rows"]
    min_p: Float[Array, " rows"]
    repetition: Float[Array, " rows"]
    presence: Float[Array, " rows"]
    frequency: Float[Array, " rows"]
    seed: UInt32[Array, " rows"]
    drawn_before: Int[Array, " rows"]
    allowed: AllowedTokens


class RowHistory(NamedTuple):
    """Tokens on which the penalties of a row depend, and its bias."""

    in_prompt: Bool[Array, "rows vocab"]
    counts: Int[Array, "rows vocab"]
    bias: Float[Array, "rows vocab"]


class DrawnTokens(NamedTuple):
    """A token for each row, with log-probabilities as in `GeneratedToken`.

    Attributes:
        kept: Distinct ids, the likeliest first; the token was drawn among the first `kept_count` of them.
    """

    token: Int[Array, " rows"]
    log_probability: Float[Array, " rows"]
    sampling_log_probability: Float[Array, " rows"]
    top_tokens: Int[Array, "rows top"]
    top_log_probabilities: Float[Array, "rows top"]
    kept: Int[Array, "rows kept"]
    kept_count: Int[Array, " rows"]


def draw_tokens(
    logits: Float[Array, "rows vocab"],
    settings: RowSettings,
    history: RowHistory,
    *,
    wants_top: Bool[Array, ""],
    kept: int = 0,
) -> DrawnTokens:
    """Draw a token for each row; its bits depend on the row's own logits, settings and history alone.

    Args:
        wants_top: Compute the most likely tokens; otherwise they are zeros.
        kept: Draw among at most this many of the tokens that the settings leave, and return which; 0 to draw among all of
            them, and return none.
    """
    allowed = exclude_tokens(penalize_logits(logits, settings, history), settings.allowed)
    processed = filter_logits(allowed, settings)
    is_drawn = settings.temperature > 0.0
    likeliest = jnp.argmax(processed, axis=-1).astype(jnp.int32)
    ids, count = jnp.zeros((logits.shape[0], 0), jnp.int32), jnp.zeros(logits.shape[0], jnp.int32)
    if kept:
        values, ids = jax.lax.top_k(processed, kept)
        ids, count = ids.astype(jnp.int32), (values > -jnp.inf).sum(axis=-1).astype(jnp.int32)

    def draw() -> tuple[jax.Array, jax.Array]:
        token = jnp.where(is_drawn, jax.vmap(_draw)(processed, settings).astype(jnp.int32), likeliest)
        return token, jnp.where(is_drawn, _at(log_softmax(processed), token), 0.0)

    def draw_kept() -> tuple[jax.Array, jax.Array]:
        # As the trainer computes them: among all tokens at the temperature, and then among those that are kept.
        among_all = log_softmax(_scale(allowed, settings))
        among_kept = kept_log_softmax(jnp.take_along_axis(among_all, ids, axis=-1), count)
        place = jnp.where(is_drawn, jax.vmap(_draw)(among_kept, settings).astype(jnp.int32), 0)
        return _at(ids, place), jnp.where(is_drawn, _at(among_kept, place), 0.0)

    # Random bits for a vocabulary take longer than a small model.
    token, sampled = jax.lax.cond(
        is_drawn.any(), draw_kept if kept else draw, lambda: (likeliest, jnp.zeros_like(settings.temperature))
    )
    log_probabilities = log_softmax(logits)
    top = min(MAX_TOP_LOG_PROBABILITIES, logits.shape[-1])
    no_top = jnp.zeros((logits.shape[0], top), logits.dtype), jnp.zeros((logits.shape[0], top), jnp.int32)
    values, tokens = jax.lax.cond(wants_top, lambda: tuple(jax.lax.top_k(log_probabilities, top)), lambda: no_top)
    return DrawnTokens(token, _at(log_probabilities, token), sampled, tokens, values, ids, count)


def penalize_logits(
    logits: Float[Array, "rows vocab"], settings: RowSettings, history: RowHistory
) -> Float[Array, "rows vocab"]:
    """Apply bias and penalties."""
    logits = logits + history.bias
    occurs = history.in_prompt | (history.counts > 0)
    repetition = settings.repetition[:, None]
    logits = jnp.where(occurs, jnp.where(logits > 0, logits / repetition, logits * repetition), logits)
    counts = history.counts.astype(jnp.float32)
    return logits - settings.presence[:, None] * jnp.minimum(counts, 1.0) - settings.frequency[:, None] * counts


def exclude_tokens(logits: Float[Array, "rows vocab"], allowed: AllowedTokens) -> Float[Array, "rows vocab"]:
    """Set the logits of tokens that a row's constraint does not allow to -inf."""

    def exclude() -> jax.Array:
        places = jnp.arange(logits.shape[-1])
        shifts = (places % WORD_BITS).astype(jnp.uint32)[None]
        bits = (allowed.bits[:, places // WORD_BITS] >> shifts) & 1
        return jnp.where((bits == 1) | ~allowed.constrained[:, None], logits, -jnp.inf)

    return jax.lax.cond(allowed.constrained.any(), exclude, lambda: logits)


def filter_logits(logits: Float[Array, "rows vocab"], settings: RowSettings) -> Float[Array, "rows vocab"]:
    """Divide by the temperature, and set the logits of excluded tokens to -inf.

    Tokens with a logit equal to the last included one's are included too.
    """
    logits = _scale(logits, settings)
    by_rank = (settings.top_k > 0) | (settings.top_p < 1.0)
    # Sorting a vocabulary takes longer than a small model: only if a row asks for it.
    logits = jax.lax.cond(by_rank.any(), lambda: _filter_by_rank(logits, settings), lambda: logits)
    # log(0) excludes none.
    threshold = logits.max(axis=-1, keepdims=True) + jnp.log(settings.min_p)[:, None]
    return jnp.where(logits < threshold, -jnp.inf, logits)


def _scale(logits: jax.Array, settings: RowSettings) -> jax.Array:
    temperature = settings.temperature[:, None]
    return logits / jnp.where(temperature > 0.0, temperature, 1.0)


def _filter_by_rank(logits: jax.Array, settings: RowSettings) -> jax.Array:
    vocab = logits.shape[-1]
    descending = -jnp.sort(-logits, axis=-1)
    k = jnp.where(settings.top_k > 0, jnp.minimum(settings.top_k, vocab), vocab)[:, None]
    rank = jnp.arange(vocab)[None]
    probabilities = jax.nn.softmax(jnp.where(rank < k, descending, -jnp.inf), axis=-1)
    before = jnp.cumsum(probabilities, axis=-1) - probabilities
    # The most likely token is always included.
    included = (rank < k) & ((before < settings.top_p[:, None]) | (settings.top_p[:, None] >= 1.0)) | (rank == 0)
    last = jnp.take_along_axis(descending, included.sum(axis=-1, keepdims=True) - 1, axis=-1)
    return jnp.where(logits < last, -jnp.inf, logits)


def _draw(logits: jax.Array, settings: RowSettings) -> jax.Array:
    key = jax.random.fold_in(jax.random.key(settings.seed), settings.drawn_before)
    return jax.random.categorical(key, logits)


def _at(values: jax.Array, token: jax.Array) -> jax.Array:
    return jnp.take_along_axis(values, token[:, None], axis=-1)[:, 0]
