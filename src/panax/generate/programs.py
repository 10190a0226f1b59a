"""The compiled programs of an engine: a chunk of one row's prompt, a token of every row, a copy of a row's cache.

Their shapes depend on the engine alone, so no request compiles another program, and a request's numbers do not depend
on other requests: its prompt goes through the same chunks, its tokens through the same rows.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from ..core.protocols import IncrementalModel
from .draw import DrawnTokens, RowHistory, RowSettings, draw_tokens


class EngineState(NamedTuple):
    """Arrays of all rows, updated in place.

    Attributes:
        cache: As the model creates it.
    """

    cache: Any
    history: RowHistory


class PromptChunk(NamedTuple):
    """A part of one row's prompt.

    Attributes:
        tokens: Padded at the end.
        following: The token after each of `tokens`, for their log-probabilities.
        row: Index of the row.
        start: Index of the first token in the prompt; 0 empties the row's cache first.
        size: Number of tokens, without padding.
        in_prompt: True for the tokens of the whole prompt.
        bias: The request's bias.
        wants_scores: Score `following`; otherwise the scores are zeros.
        wants_top: Compute the most likely tokens.
    """

    tokens: Int[Array, " chunk"]
    following: Int[Array, " chunk"]
    row: Int[Array, ""]
    start: Int[Array, ""]
    size: Int[Array, ""]
    in_prompt: Bool[Array, " vocab"]
    bias: Float[Array, " vocab"]
    wants_scores: Bool[Array, ""]
    wants_top: Bool[Array, ""]


class PromptScores(NamedTuple):
    """Of each token of a chunk: the log-probability of the one after it, and the likeliest one with its own."""

    log_probability: Float[Array, " chunk"]
    likeliest: Int[Array, " chunk"]
    likeliest_log_probability: Float[Array, " chunk"]


class NextTokens(NamedTuple):
    """The last token of each row.

    Attributes:
        start: Its position.
        active: False for rows without a request or with an incomplete prompt: their caches stay as they are.
        wants_top: Compute the most likely tokens.
    """

    tokens: Int[Array, " rows"]
    start: Int[Array, " rows"]
    active: Bool[Array, " rows"]
    wants_top: Bool[Array, ""]


SCORED_AT_ONCE = 16
"""Positions of a prompt with logits in memory at the same time."""


def empty_state(model: IncrementalModel, rows: int, length: int) -> EngineState:
    """Create the state of rows without requests."""
    shape = rows, model.vocab_size
    history = RowHistory(jnp.zeros(shape, bool), jnp.zeros(shape, jnp.int32), jnp.zeros(shape, jnp.float32))
    # Programs take the arrays over, so that no two may be the same one.
    return EngineState(jax.tree.map(jnp.copy, model.empty_cache(rows, length)), history)


@functools.partial(jax.jit, donate_argnums=1)
def run_prompt_chunk(
    model: IncrementalModel, state: EngineState, chunk: PromptChunk, settings: RowSettings
) -> tuple[EngineState, DrawnTokens, PromptScores]:
    """Run a chunk of a prompt; draw the token after it, and score its tokens.

    Args:
        settings: Of this row, each with one element.

    Returns:
        The state; a token, which is meaningful after the last chunk; the scores of `chunk.following`.
    """
    row = chunk.row
    cache = jax.tree.map(lambda leaf: _row_of(leaf, row), state.cache)
    cache = jax.tree.map(lambda leaf: jnp.where(chunk.start == 0, jnp.zeros_like(leaf), leaf), cache)
    hidden, cache = model.extend(chunk.tokens[None], chunk.start[None], chunk.size[None], cache)
    last = jax.lax.dynamic_index_in_dim(hidden[0], chunk.size - 1, axis=0)

    history = RowHistory(chunk.in_prompt[None], jnp.zeros((1, model.vocab_size), jnp.int32), chunk.bias[None])
    drawn = draw_tokens(model.logits(last), settings, history, wants_top=chunk.wants_top)
    history = history._replace(counts=history.counts.at[0, drawn.token[0]].add(1))

    scores = jax.lax.cond(
        chunk.wants_scores,
        lambda: _score(model, hidden[0], chunk.following),
        lambda: _no_scores(chunk.tokens.shape[0]),
    )
    state = jax.tree.map(lambda leaf, new: _with_row(leaf, new, row), state, EngineState(cache, history))
    return state, drawn, scores


@functools.partial(jax.jit, donate_argnums=1)
def run_decode_step(
    model: IncrementalModel, state: EngineState, inputs: NextTokens, settings: RowSettings
) -> tuple[EngineState, DrawnTokens]:
    """Run each active row's last token, and draw the one after it."""
    hidden, cache = model.extend(inputs.tokens[:, None], inputs.start, inputs.active.astype(jnp.int32), state.cache)
    drawn = draw_tokens(model.logits(hidden[:, 0]), settings, state.history, wants_top=inputs.wants_top)
    rows = jnp.arange(inputs.tokens.shape[0])
    counts = state.history.counts.at[rows, drawn.token].add(inputs.active.astype(jnp.int32))
    return EngineState(cache, state.history._replace(counts=counts)), drawn


@functools.partial(jax.jit, donate_argnums=0)
def copy_row(state: EngineState, source: Int[Array, ""], target: Int[Array, ""]) -> EngineState:
    """Copy a row's cache to another row; its history belongs to the request and is not copied."""
    cache = jax.tree.map(lambda leaf: _with_row(leaf, _row_of(leaf, source), target), state.cache)
    return state._replace(cache=cache)


def _no_scores(size: int) -> PromptScores:
    zeros = jnp.zeros(size, jnp.float32)
    return PromptScores(zeros, jnp.zeros(size, jnp.int32), zeros)


def _score(model: IncrementalModel, hidden: jax.Array, following: jax.Array) -> PromptScores:
    def one(pair: tuple[jax.Array, jax.Array]) -> PromptScores:
        position, token = pair
        log_probabilities = jax.nn.log_softmax(model.logits(position[None])[0])
        likeliest = jnp.argmax(log_probabilities).astype(jnp.int32)
        return PromptScores(log_probabilities[token], likeliest, log_probabilities[likeliest])

    return jax.lax.map(one, (hidden, following), batch_size=min(SCORED_AT_ONCE, hidden.shape[0]))


def _row_of(leaf: jax.Array, row: jax.Array) -> jax.Array:
    return jax.lax.dynamic_slice_in_dim(leaf, row, 1, axis=0)


def _with_row(leaf: jax.Array, new: jax.Array, row: jax.Array) -> jax.Array:
    return jax.lax.dynamic_update_slice_in_dim(leaf, new.astype(leaf.dtype), row, axis=0)
