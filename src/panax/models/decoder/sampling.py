"""Text generation with a key-value cache: one compiled prefill and one compiled decoding loop."""

import functools
import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.core import Tracer
from jaxtyping import Array, Float, Int, Key

from ...core.errors import DataError, RecipeError
from ...core.layout.layout import current_layout
from ...layers import Context
from ...layers.stack import split_state_by_stack
from ...spmd import all_gather_sequence, contract
from ...spmd.collectives import all_gather
from .model import Decoder, layer_state


def sample(
    model: Decoder,
    prompt: Int[Array, "batch prompt"],
    num_tokens: int,
    key: Key[Array, ""],
    *,
    temperature: float = 1.0,
    top_k: int = 0,
    dtype: Any = jnp.float32,
    state: Mapping[str, Any] | None = None,
) -> Int[Array, "batch generated"]:
    """Continue each prompt by `num_tokens` tokens.

    Args:
        prompt: Token ids without padding; at least one.
        temperature: Divisor of the logits; 0 is greedy decoding.
        top_k: Sample from the k most likely tokens; 0 samples from all.
        state: The task's model state, if it has any.

    Raises:
        RecipeError: Prompt and continuation exceed the model's maximum length, or a setting is out of range.
        DataError: The prompt is empty, or contains a token outside the vocabulary.
    """
    _check_settings(num_tokens, temperature, top_k)
    _check_prompt(prompt, model.config.vocab_size)
    total = prompt.shape[1] + num_tokens
    if total > model.config.max_length:
        raise RecipeError(
            f"{prompt.shape[1]} prompt tokens and {num_tokens} new ones are {total}, the model is for at most "
            f"{model.config.max_length}; shorten the prompt, or ask for fewer"
        )
    # The length is rounded up, so that fewer programs are compiled.
    length = min(-(-total // 64) * 64, model.config.max_length)
    program = _SamplingProgram(min(top_k, model.config.vocab_size), jnp.dtype(dtype).name, length)
    drawn = _sample(model, prompt, jnp.int32(num_tokens), key, jnp.float32(temperature), program, state or {})
    return drawn[:, :num_tokens]


def _check_settings(num_tokens: int, temperature: float, top_k: int) -> None:
    if not 0 <= temperature < math.inf:
        raise RecipeError(f"temperature={temperature}; expected 0 for the likeliest token, or a positive number")
    if top_k < 0:
        raise RecipeError(f"top_k={top_k}; expected a number of tokens to draw among, or 0 for all")
    if num_tokens < 1:
        raise RecipeError(f"{num_tokens} tokens to generate; expected 1 or more")


def _check_prompt(prompt: jax.Array, vocab_size: int) -> None:
    if prompt.shape[1] < 1:
        raise DataError("the prompt has no token; pass at least one to continue")
    if isinstance(prompt, Tracer):
        return
    low, high = int(prompt.min()), int(prompt.max())
    if low < 0 or high >= vocab_size:
        raise DataError(
            f"the prompt holds the token {low if low < 0 else high}; the model has tokens 0 to {vocab_size - 1}: "
            "encode it with "
            f"the model's own tokenizer"
        )


class _SamplingProgram(NamedTuple):
    """Settings that a sampling program is compiled for; other settings are its arguments.

    Attributes:
        length: Positions of the caches.
    """

    top_k: int
    dtype: str
    length: int


@functools.partial(jax.jit, static_argnums=5)
def _sample(
    model: Decoder,
    prompt: jax.Array,
    num_tokens: jax.Array,
    key: jax.Array,
    temperature: jax.Array,
    program: _SamplingProgram,
    state: Mapping[str, Any],
) -> jax.Array:
    top_k, dtype, length = program
    caches = tuple(stack.empty_caches(prompt.shape[0], length, dtype) for stack in model.stacks)

    def forward(tokens: jax.Array, caches: Any, start: jax.Array) -> tuple[jax.Array, Any]:
        context = Context(jnp.broadcast_to(start + jnp.arange(tokens.shape[1])[None], tokens.shape))
        x = model.embed(tokens, context.position, dtype)
        new = []
        for stack, cache, stack_state in zip(
            model.stacks, caches, split_state_by_stack(model.stacks, layer_state(state))
        ):
            x, cache = stack.extend(x, context, cache, start, stack_state)
            new.append(cache)
        return compute_logits(model, model.normalize(x[:, -1:]))[:, 0], tuple(new)

    def draw(logits: jax.Array, key: jax.Array) -> jax.Array:
        likeliest = jnp.argmax(logits, axis=-1)
        if top_k:
            kth_logit = jax.lax.top_k(logits, top_k)[0][:, -1:]
            logits = jnp.where(logits < kth_logit, -jnp.inf, logits)
        # The temperature is an argument of the program: one compilation serves all values.
        drawn = jax.random.categorical(key, logits / jnp.where(temperature == 0.0, 1.0, temperature))
        return jnp.where(temperature == 0.0, likeliest, drawn).astype(prompt.dtype)

    logits, caches = forward(prompt, caches, jnp.int32(0))

    def one(i: jax.Array, carry: tuple[jax.Array, Any, jax.Array]) -> tuple[jax.Array, Any, jax.Array]:
        logits, caches, tokens = carry
        token = draw(logits, jax.random.fold_in(key, i))
        logits, caches = forward(token[:, None], caches, prompt.shape[1] + i)
        return logits, caches, tokens.at[i].set(token)

    room = jnp.zeros((length - prompt.shape[1], prompt.shape[0]), prompt.dtype)
    # The trip count is an argument, so another number of tokens does not recompile.
    return jax.lax.fori_loop(0, num_tokens, one, (logits, caches, room))[2].T


def gather_logits(model: Decoder, hidden: Float[Array, "batch residual embed"]) -> Float[Array, "batch seq vocab"]:
    """Return the logits of this device's positions in float32, gathered over a sharded vocabulary; not
    differentiable.
    """
    hidden, table = jax.lax.stop_gradient((hidden, model.output_table))
    logits = contract(
        "batch seq embed, vocab embed -> batch seq vocab", all_gather_sequence(hidden), table, out_dtype=jnp.float32
    )
    layout = current_layout()
    axes = () if layout is None else layout.compute(("vocab",))[0]
    logits = all_gather(logits, axes, logits.ndim - 1)[..., : model.config.vocab_size]
    cap = model.config.logit_soft_cap
    return logits if cap is None else cap * jnp.tanh(logits / cap)


def compute_logits(model: Decoder, hidden: Float[Array, "batch seq embed"]) -> Float[Array, "batch seq vocab"]:
    """Return all logits in float32, for small inputs: the computation is not chunked."""
    logits = contract(
        "batch seq embed, vocab embed -> batch seq vocab", hidden, model.output_table, out_dtype=jnp.float32
    )[..., : model.config.vocab_size]
    cap = model.config.logit_soft_cap
    return logits if cap is None else cap * jnp.tanh(logits / cap)
