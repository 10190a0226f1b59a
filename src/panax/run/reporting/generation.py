"""Text generation with a trained model: any task that generates, with its tokenizer."""

import datetime
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from ...core import Task
from ...core.errors import RecipeError
from ...data.text.tokenizer import Tokenizer


def _whole(leaf: jax.Array) -> np.ndarray:
    """Return an array on the host, gathered from the devices of all processes; each of them calls it."""
    if leaf.is_fully_addressable:
        return np.asarray(leaf)
    from jax.experimental import multihost_utils

    return np.asarray(multihost_utils.process_allgather(leaf, tiled=True))


class TextModel(NamedTuple):
    """A task with the values that it generates text with.

    Attributes:
        state: The task's model state.
        tokenizer: None for a task without one, which is refused.
    """

    task: Task
    params: Any
    state: Any
    tokenizer: Tokenizer | None


def generate_text(
    model: TextModel,
    prompt: str,
    *,
    tokens: int = 128,
    temperature: float = 0.8,
    top_k: int = 50,
    seed: int = 0,
    chat: bool = False,
) -> str:
    """Generate a model's continuation of `prompt`, up to the end of the document, or of an answer.

    Args:
        tokens: Maximum number of tokens to add.
        temperature: 0 takes the likeliest token.
        top_k: Sample from this many likeliest tokens; 0: from all.
        seed: Seed of the sampling.
        chat: True to render the prompt as a user's message by the tokenizer's chat template, and return the answer.

    Raises:
        RecipeError: The task does not generate, or there is no tokenizer or chat template; the prompt is empty or
            too long; a setting is out of range.
    """
    task, params, state, tokenizer = model
    if not task.generates or tokenizer is None:
        lacks = "has no tokenizer" if task.generates else "does not generate"
        raise RecipeError(f"{type(task).__name__} {lacks}; a text model with its tokenizer continues a text")
    for name, value, minimum in (("tokens", tokens, 1), ("temperature", temperature, 0), ("top_k", top_k, 0)):
        if value < minimum:
            raise RecipeError(f"{name}={value}; expected {minimum} or more")
    ids = [*tokenizer.start_of_document, *tokenizer.encode(prompt)]
    if not ids or (chat and not prompt):
        raise RecipeError("the prompt is empty; pass at least one character")
    if chat:
        ids = _encode_chat(tokenizer, prompt)
    # On one device, however it was trained: a single row has nothing to be split over. By way of the host,
    # since moving an array to a device that it is on already would leave the training mesh in its type.
    params, state = jax.tree.map(lambda leaf: jax.device_put(_whole(leaf), jax.local_devices()[0]), (params, state))
    rows = jnp.asarray([ids], jnp.int32)
    new = task.generate(params, state, rows, tokens, jax.random.key(seed), temperature=temperature, top_k=top_k)
    new = np.asarray(new)[0].tolist()
    length = next((place for place, token in enumerate(new) if token in tokenizer.end_ids), len(new))
    return tokenizer.decode(new[:length])


def _encode_chat(tokenizer: Tokenizer, prompt: str) -> list[int]:
    """Return the ids of a conversation with one message of the user, and the beginning of an answer."""
    from ...data.chats.template import ChatTemplate, RenderError

    source = tokenizer.chat_templates.get("default")
    if source is None:
        raise RecipeError("the tokenizer has no chat template, which chat=True applies; remove it")
    today = datetime.date.today().isoformat()
    template = ChatTemplate(source, name="the tokenizer", tokens=tokenizer.role_tokens, date=today)
    try:
        text = template.render([{"role": "user", "content": prompt}], add_generation_prompt=True)
    except RenderError as error:
        raise RecipeError(f"the chat template fails on the prompt: {error}") from error
    return tokenizer.encode_rendered([text])[0].ids
