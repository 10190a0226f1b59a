"""The compiled programs of an engine: a chunk of one row's prompt, a token of every row, a copy of a row's cache.

Their shapes depend on the engine alone, so no request compiles another program, and a request's numbers do not depend
on other requests: its prompt goes through the same chunks, its tokens through the same rows.

On a mesh, each group of devices has a part of the rows, and runs chunks of its own. Shapes are of all groups:
`PromptChunk` has equally many chunks for each, and rows are numbered within their group.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jaxtyping import Array, Bool, Float, Int, Shaped

from ..core import current_layout
from ..core.protocols import IncrementalModel
from ..kernels.row_functions import log_softmax
from ..mesh.placement import Placement
from .draw import DrawnTokens, RowHistory, RowSettings, draw_tokens
from .shards import ProgramSettings, cache_specs, count_row_groups, gather_rows, map_rows, model_specs, row_spec


class EngineState(NamedTuple):
    """Arrays of all rows, updated in place.

    Attributes:
        cache: As the model creates it.
    """

    cache: Any
    history: RowHistory


class PromptChunk(NamedTuple):
    """Parts of prompts, equally many for each group.

    Attributes:
        tokens: Padded at the end.
        following: The token after each of `tokens`, for their log-probabilities.
        row: Indices, in their group, of the rows that hold answers to the prompt: the first one has the prompt's cache so far,
            the others get it with the last chunk; the number of rows for none.
        start: Index of the first token in the prompt; 0 empties the row's cache first.
        size: Number of tokens, without padding; 0 for no prompt: its row is left as it is.
        in_prompt: True for the tokens of the whole prompt.
        bias: The request's bias.
        wants_scores: Score `following`; otherwise the scores are zeros.
        wants_top: Compute the most likely tokens.
    """

    tokens: Int[Array, "prompts chunk"]
    following: Int[Array, "prompts chunk"]
    row: Int[Array, "prompts samples"]
    start: Int[Array, " prompts"]
    size: Int[Array, " prompts"]
    in_prompt: Bool[Array, "prompts vocab"]
    bias: Float[Array, "prompts vocab"]
    wants_scores: Bool[Array, ""]
    wants_top: Bool[Array, ""]


class PromptScores(NamedTuple):
    """Of each token of a chunk: the log-probability of the one after it, and the likeliest one with its own."""

    log_probability: Float[Array, "prompts chunk"]
    likeliest: Int[Array, "prompts chunk"]
    likeliest_log_probability: Float[Array, "prompts chunk"]


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


class DraftedTokens(NamedTuple):
    """The last token of each row, and guesses of those after it.

    Attributes:
        start: Position of the last token.
        size: Number of tokens, without padding; 0 for rows as those that are not active in `NextTokens`.
        wants_top: Compute the most likely tokens.
    """

    tokens: Int[Array, "rows drafted"]
    start: Int[Array, " rows"]
    size: Int[Array, " rows"]
    wants_top: Bool[Array, ""]


SCORED_AT_ONCE = 16
"""Positions of a prompt with logits in memory at the same time."""


@functools.partial(jax.jit, static_argnums=(1, 2, 3))
def empty_state(model: IncrementalModel, rows: int, length: int, compiled_for: ProgramSettings) -> EngineState:
    """Create the state of rows without requests."""
    placement = compiled_for.placement

    def create(model: IncrementalModel) -> EngineState:
        local = rows // count_row_groups(placement)
        shape = local, model.vocab_size
        history = RowHistory(jnp.zeros(shape, bool), jnp.zeros(shape, jnp.int32), jnp.zeros(shape, jnp.float32))
        return EngineState(model.empty_cache(local, length), history)

    return map_rows(create, compiled_for, (model_specs(placement, model),), state_specs(model, placement))(model)


@functools.partial(jax.jit, donate_argnums=1, static_argnums=4)
def run_prompt_chunk(
    model: IncrementalModel,
    state: EngineState,
    chunk: PromptChunk,
    settings: RowSettings,
    compiled_for: ProgramSettings,
) -> tuple[EngineState, DrawnTokens, PromptScores]:
    """Run chunks of prompts; draw the token after each, and score their tokens.

    Args:
        settings: Of the prompts' rows, those of one prompt together.

    Returns:
        The state; a token for each of these rows, which is meaningful after the last chunk; the scores of `chunk.following`.
    """
    placement = compiled_for.placement
    rows, states = row_spec(placement), state_specs(model, placement)
    everywhere = PartitionSpec()
    chunks = PromptChunk._make([*[rows] * 7, everywhere, everywhere])
    arguments = model_specs(placement, model), states, chunks, rows
    chunk_program = functools.partial(_run_prompt_chunk, kept=compiled_for.kept)
    run = map_rows(chunk_program, compiled_for, arguments, (states, everywhere, everywhere))
    return run(model, state, chunk, settings)


def _run_prompt_chunk(
    model: IncrementalModel, state: EngineState, chunk: PromptChunk, settings: RowSettings, *, kept: int
) -> tuple[EngineState, DrawnTokens, PromptScores]:
    (count, size), samples = chunk.tokens.shape, chunk.row.shape[1]
    before = jax.tree.map(lambda leaf: _rows_of(leaf, chunk.row[:, 0]), state)
    is_first = chunk.start == 0
    cache = jax.tree.map(lambda leaf: jnp.where(_beside(is_first, leaf), jnp.zeros_like(leaf), leaf), before.cache)
    hidden, cache = model.extend(chunk.tokens, chunk.start, chunk.size, cache)
    last = jnp.take_along_axis(hidden, jnp.maximum(chunk.size - 1, 0)[:, None, None], axis=1)[:, 0]

    def repeat(leaf: jax.Array) -> jax.Array:
        return leaf if samples == 1 else jnp.repeat(leaf, samples, axis=0)

    rows = count * samples
    counts = jnp.zeros((rows, model.vocab_size), jnp.int32)
    history = RowHistory(repeat(chunk.in_prompt), counts, repeat(chunk.bias))
    drawn = draw_tokens(repeat(model.logits(last)), settings, history, wants_top=chunk.wants_top, kept=kept)
    history = history._replace(counts=history.counts.at[jnp.arange(rows), drawn.token].add(1))

    scores = jax.lax.cond(
        chunk.wants_scores,
        lambda: _score(model, hidden.reshape(count * size, -1), chunk.following.reshape(-1)),
        lambda: _no_scores(count * size),
    )
    after = EngineState(cache, history)
    if current_layout() is not None and rows == 1:
        # A group without a prompt keeps its row.
        has_prompt = chunk.size > 0
        after = jax.tree.map(
            lambda new, old: jnp.where(_beside(has_prompt, old), new.astype(old.dtype), old), after, before
        )

    def copy(sample: Int[Array, ""] | int, cache: Any) -> Any:
        places = chunk.row[:, sample]
        return jax.tree.map(lambda leaf, new: _with_rows(leaf, new, places, is_only=rows == 1), cache, after.cache)

    cache = copy(0, state.cache) if samples == 1 else jax.lax.fori_loop(0, samples, copy, state.cache)
    written = chunk.row.reshape(-1)
    history = jax.tree.map(
        lambda leaf, new: _with_rows(leaf, new, written, is_only=rows == 1), state.history, after.history
    )
    return EngineState(cache, history), *gather_rows(
        (drawn, jax.tree.map(lambda leaf: leaf.reshape(count, size), scores))
    )


@functools.partial(jax.jit, donate_argnums=1, static_argnums=4)
def run_decode_step(
    model: IncrementalModel,
    state: EngineState,
    inputs: NextTokens,
    settings: RowSettings,
    compiled_for: ProgramSettings,
) -> tuple[EngineState, DrawnTokens]:
    """Run each active row's last token, and draw the one after it."""
    placement = compiled_for.placement
    rows, states = row_spec(placement), state_specs(model, placement)
    nexts = NextTokens._make([rows, rows, rows, PartitionSpec()])
    arguments = model_specs(placement, model), states, nexts, rows

    def run(*inputs: Any) -> tuple[EngineState, DrawnTokens]:
        state, drawn = decode_rows(*inputs, kept=compiled_for.kept)
        return state, gather_rows(drawn)

    return map_rows(run, compiled_for, arguments, (states, PartitionSpec()))(model, state, inputs, settings)


def decode_rows(
    model: IncrementalModel, state: EngineState, inputs: NextTokens, settings: RowSettings, *, kept: int
) -> tuple[EngineState, DrawnTokens]:
    """Run each active row's last token, of this device's rows, and draw the one after it.

    Args:
        kept: See `draw_tokens`.
    """
    hidden, cache = model.extend(inputs.tokens[:, None], inputs.start, inputs.active.astype(jnp.int32), state.cache)
    logits = model.logits(hidden[:, 0])
    drawn = draw_tokens(logits, settings, state.history, wants_top=inputs.wants_top, kept=kept)
    rows = jnp.arange(inputs.tokens.shape[0])
    counts = state.history.counts.at[rows, drawn.token].add(inputs.active.astype(jnp.int32))
    return EngineState(cache, state.history._replace(counts=counts)), drawn


@functools.partial(jax.jit, donate_argnums=1, static_argnums=4)
def run_draft_step(
    model: IncrementalModel,
    state: EngineState,
    inputs: DraftedTokens,
    settings: RowSettings,
    compiled_for: ProgramSettings,
) -> tuple[EngineState, DrawnTokens]:
    """Run each row's last token and the guesses after it, and draw the token after each of these.

    Returns:
        The state; the drawn tokens, [rows, drafted, ...]. One is valid if all guesses before it are equal to the tokens
        that are drawn in their places; for the others, nothing is counted.
    """
    placement = compiled_for.placement
    rows, states = row_spec(placement), state_specs(model, placement)
    drafted = DraftedTokens._make([rows, rows, rows, PartitionSpec()])
    arguments = model_specs(placement, model), states, drafted, rows
    step = functools.partial(_run_draft_step, kept=compiled_for.kept)
    run = map_rows(step, compiled_for, arguments, (states, PartitionSpec()))
    return run(model, state, inputs, settings)


def _run_draft_step(
    model: IncrementalModel, state: EngineState, inputs: DraftedTokens, settings: RowSettings, *, kept: int
) -> tuple[EngineState, DrawnTokens]:
    hidden, cache = model.extend(inputs.tokens, inputs.start, inputs.size, state.cache)
    rows = jnp.arange(inputs.tokens.shape[0])

    def draw(
        carry: tuple[Int[Array, "rows vocab"], Bool[Array, " rows"]], place: Int[Array, ""]
    ) -> tuple[Any, DrawnTokens]:
        counts, is_valid = carry
        # Logits of one place at a time: a vocabulary may be large.
        logits = model.logits(jax.lax.dynamic_index_in_dim(hidden, place, axis=1, keepdims=False))
        here = settings._replace(drawn_before=settings.drawn_before + place)
        history = state.history._replace(counts=counts)
        drawn = draw_tokens(logits, here, history, wants_top=inputs.wants_top, kept=kept)
        counts = counts.at[rows, drawn.token].add(is_valid.astype(jnp.int32))
        following = jnp.take(inputs.tokens, jnp.minimum(place + 1, inputs.tokens.shape[1] - 1), axis=1)
        return (counts, is_valid & (place + 1 < inputs.size) & (drawn.token == following)), drawn

    places = jnp.arange(inputs.tokens.shape[1])
    (counts, _), drawn = jax.lax.scan(draw, (state.history.counts, inputs.size > 0), places)
    drawn = jax.tree.map(lambda leaf: leaf.swapaxes(0, 1), drawn)
    return EngineState(cache, state.history._replace(counts=counts)), gather_rows(drawn)


@functools.partial(jax.jit, donate_argnums=1, static_argnums=4)
def copy_row(
    model: IncrementalModel,
    state: EngineState,
    source: Int[Array, " groups"],
    target: Int[Array, " groups"],
    compiled_for: ProgramSettings,
) -> EngineState:
    """Copy a row's cache to another row of its group; its history belongs to the request and is not copied.

    Args:
        source, target: Indices in the group; equal in groups that copy nothing.
    """

    def copy(state: EngineState, source: jax.Array, target: jax.Array) -> EngineState:
        cache = jax.tree.map(lambda leaf: _with_row(leaf, _row_of(leaf, source[0]), target[0]), state.cache)
        return state._replace(cache=cache)

    placement = compiled_for.placement
    rows, states = row_spec(placement), state_specs(model, placement)
    return map_rows(copy, compiled_for, (states, rows, rows), states)(state, source, target)


@functools.partial(jax.jit, static_argnums=3)
def read_row_experts(
    model: IncrementalModel, state: EngineState, row: Int[Array, " groups"], compiled_for: ProgramSettings
) -> Int[Array, "groups length layer active"]:
    """Return the experts that each position of one row of each group used, for a model that records them."""

    def read(state: EngineState, row: jax.Array) -> jax.Array:
        cache = jax.tree.map(lambda leaf: _row_of(leaf, row[0]), state.cache)
        return gather_rows(model.read_experts(cache))

    placement = compiled_for.placement
    arguments = state_specs(model, placement), row_spec(placement)
    return map_rows(read, compiled_for, arguments, PartitionSpec())(state, row)


def state_specs(model: IncrementalModel, placement: Placement | None) -> EngineState:
    """Return the specs of an engine's arrays."""
    return EngineState(cache_specs(placement, model), row_spec(placement))  # pyright: ignore[reportArgumentType]


def _no_scores(size: int) -> PromptScores:
    zeros = jnp.zeros(size, jnp.float32)
    return PromptScores(zeros, jnp.zeros(size, jnp.int32), zeros)


def _score(model: IncrementalModel, hidden: jax.Array, following: jax.Array) -> PromptScores:
    def one(pair: tuple[jax.Array, jax.Array]) -> PromptScores:
        position, token = pair
        log_probabilities = log_softmax(model.logits(position[None]))[0]
        likeliest = jnp.argmax(log_probabilities).astype(jnp.int32)
        return PromptScores(log_probabilities[token], likeliest, log_probabilities[likeliest])

    return jax.lax.map(one, (hidden, following), batch_size=min(SCORED_AT_ONCE, hidden.shape[0]))


def _beside(rows: Shaped[Array, " rows"], leaf: Shaped[Array, "rows ..."]) -> Shaped[Array, "rows ..."]:
    """Return a value for each row with as many dimensions as `leaf`."""
    return rows.reshape(-1, *[1] * (leaf.ndim - 1))


def _rows_of(leaf: jax.Array, rows: Int[Array, " prompts"]) -> jax.Array:
    if rows.shape[0] == 1:
        return _row_of(leaf, rows[0])
    return jnp.take(leaf, rows, axis=0, mode="clip")


def _with_rows(leaf: jax.Array, new: jax.Array, rows: Int[Array, " prompts"], *, is_only: bool) -> jax.Array:
    """Return an array with some rows replaced; those that it does not have are dropped.

    Args:
        is_only: True if a program replaces one row, which the array has.
    """
    if is_only:
        return _with_row(leaf, new, rows[0])
    return leaf.at[rows].set(new.astype(leaf.dtype), mode="drop", unique_indices=False)


def _row_of(leaf: jax.Array, row: jax.Array) -> jax.Array:
    return jax.lax.dynamic_slice_in_dim(leaf, row, 1, axis=0)


def _with_row(leaf: jax.Array, new: jax.Array, row: jax.Array) -> jax.Array:
    return jax.lax.dynamic_update_slice_in_dim(leaf, new.astype(leaf.dtype), row, axis=0)
