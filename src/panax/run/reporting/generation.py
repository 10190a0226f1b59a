"""Text generation with a trained model: any task that generates, with its tokenizer."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from ...core import Task
from ...core.errors import DataError, RecipeError
from ...data.text.tokenizer import Tokenizer
from ...generate import GenerationEngine, GenerationRequest, Sampling, encode_prompt
from ...generate.shards import create_model, place_model
from ...kernels import Kernels
from ...mesh import Placement

LENGTH_MULTIPLE = 64
"""Positions to a multiple of which a row is rounded up."""


def _whole(leaf: jax.Array) -> np.ndarray:
    """Return an array on the host, gathered from the devices of all processes; each of them calls it."""
    if leaf.is_fully_addressable:
        return np.asarray(leaf)
    from jax.experimental import multihost_utils

    return np.asarray(multihost_utils.process_allgather(leaf, tiled=True))


def _on_one_device(leaf: jax.Array) -> jax.Array:
    """Return an array on the default device, without a mesh in its type."""
    device = jax.local_devices()[0]
    if leaf.is_fully_replicated and leaf.sharding.device_set == {device}:
        # The same memory; moving an array to the device that it is on already would leave the mesh in its type.
        return leaf.addressable_data(0)
    return jax.device_put(_whole(leaf))


class TextModel(NamedTuple):
    """A task with the values that it generates text with.

    Attributes:
        state: The task's model state.
        tokenizer: None for a task without one, which is refused.
        placement: The mesh of the arrays; None for one device.
        kernels: The kernels that the recipe names.
    """

    task: Task
    params: Any
    state: Any
    tokenizer: Tokenizer | None
    placement: Placement | None = None
    kernels: Kernels = Kernels()


def check_generates(model: TextModel) -> Tokenizer:
    """Return the tokenizer of a model that generates text.

    Raises:
        RecipeError: The task does not generate, or there is no tokenizer.
    """
    task, tokenizer = model.task, model.tokenizer
    if not task.generates or tokenizer is None:
        lacks = "has no tokenizer" if task.generates else "does not generate"
        raise RecipeError(f"{type(task).__name__} {lacks}; a text model with its tokenizer continues a text")
    return tokenizer


def create_engine(
    model: TextModel,
    *,
    rows: int = 8,
    length: int | None = None,
    at_least: int = 0,
    dtype: str | None = None,
    **settings: Any,
) -> GenerationEngine:
    """Create an engine that generates with a model, on its mesh.

    Weights are gathered once, over the mesh axes that shard them in storage only. A task that does not name its axes
    generates on one device.

    Args:
        rows, length: See `GenerationEngine`.
        at_least: In place of `length`: a row has this many positions, rounded up so that prompts of similar length
            share programs, unless the model is for fewer.
        dtype: Dtype of activations and caches; by default float32, and with `exact_policy` that of training.
        settings: Further settings of `GenerationEngine`: `drafts`, `chunk`, `batching`, `kept`, `compiles`.

    Raises:
        RecipeError: The task does not generate, or there is no tokenizer; or a setting is out of range.
    """
    tokenizer = check_generates(model)
    task, params, state, _, placement, kernels = model
    dtype = dtype or (jnp.dtype(task.weight_dtype).name if kernels.exact_policy else "float32")
    if placement is None or placement.mesh.size == 1 or not task.names_axes:
        placement = None
        # By way of the host, since moving an array to a device that it is on already would leave the training mesh in
        # its type. On the default device without naming it, since the engine's caches are placed so: with another kind
        # of placement, the first request would compile its program again.
        params, state = jax.tree.map(_on_one_device, (params, state))
        incremental = create_model(task, params, state, dtype)
    else:
        placement = placement.for_generation()
        incremental = place_model(task, params, state, dtype, placement)
    if at_least:
        length = min(-(-at_least // LENGTH_MULTIPLE) * LENGTH_MULTIPLE, incremental.max_length)
    return GenerationEngine(
        incremental,
        tokenizer,
        rows=rows,
        length=length,
        placement=placement,
        kernels=kernels,
        **settings,
    )


def generate_text(
    model: TextModel,
    prompt: str,
    *,
    tokens: int = 128,
    temperature: float = 0.8,
    top_k: int = 50,
    seed: int = 0,
    chat: bool = False,
    **settings: Any,
) -> str:
    """Generate a model's continuation of `prompt`, up to the end of the document, or of an answer.

    Args:
        tokens: Maximum number of tokens to add.
        temperature: 0 takes the likeliest token.
        top_k: Sample from this many likeliest tokens; 0: from all.
        seed: Seed of the sampling.
        chat: True to render the prompt as a user's message by the tokenizer's chat template, and return the answer.
        settings: Further settings of `panax.generate.Sampling`, but `n`.

    Raises:
        RecipeError: The task does not generate, or there is no tokenizer or chat template; the prompt is empty or
            too long; a setting is out of range.
        DataError: The answer can't meet the constraint of `settings`.
    """
    sampling = Sampling(tokens=tokens, temperature=temperature, top_k=top_k, seed=seed, **settings)
    if sampling.n > 1:
        raise RecipeError(f"n={sampling.n}; this returns one text: use panax.generate.GenerationEngine for several")
    ids = encode_prompt(check_generates(model), prompt, chat=chat)
    engine = create_engine(model, rows=1, at_least=len(ids) + tokens)
    [completion] = engine.generate([GenerationRequest(tuple(ids), sampling)])
    if completion.finish == "error":
        raise DataError(f"the answer ended after {len(completion.tokens)} tokens: {completion.error}")
    return completion.text
