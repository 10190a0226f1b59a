"""`panax generate`: continue a text with a trained model."""

import argparse
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ..core.errors import RecipeError
from ..data.tokenizer import Tokenizer
from ..models import Decoder, sample
from ..run.trained import load_trained
from .main import warn


def generate(arguments: Sequence[str]) -> int:
    """Print the prompt and what the model of a checkpoint continues it with."""
    parser = argparse.ArgumentParser(prog="panax generate", description="Continue a text with a trained model.")
    parser.add_argument("checkpoint", help="a run's folder (its best checkpoint is taken), or a checkpoint's own")
    parser.add_argument("--prompt", required=True, help="the text to continue")
    parser.add_argument("--tokens", type=int, default=128, help="how many tokens to add (default: 128)")
    parser.add_argument("--temperature", type=float, default=0.8, help="0 takes the likeliest token (default: 0.8)")
    parser.add_argument("--top-k", type=int, default=50, help="draw among the likeliest so many; 0: all (default: 50)")
    parser.add_argument("--seed", type=int, default=0, help="of the random draws (default: 0)")
    options = parser.parse_args(arguments)
    trained = load_trained(options.checkpoint, warn)
    if not isinstance(trained.params, Decoder) or trained.tokenizer is None:
        raise RecipeError(f"{trained.url} holds no text model with its tokenizer; only those generate")
    text = continue_text(
        trained.params,
        trained.tokenizer,
        options.prompt,
        tokens=options.tokens,
        temperature=options.temperature,
        top_k=options.top_k,
        seed=options.seed,
        state=trained.state,
    )
    print(options.prompt + text)
    return 0


def continue_text(
    model: Decoder,
    tokenizer: Tokenizer,
    prompt: str,
    *,
    tokens: int,
    temperature: float = 0.8,
    top_k: int = 50,
    seed: int = 0,
    state: Mapping[str, Any] | None = None,
) -> str:
    """What `model` writes after `prompt`, up to the end of the document.

    Args:
        state: The task's model state, where it has any.

    Raises:
        RecipeError: The prompt is empty or too long, or a setting is out of range.
    """
    if tokens < 1 or temperature < 0 or top_k < 0:
        raise RecipeError(f"tokens={tokens}, temperature={temperature}, top_k={top_k}; expected at least 1, 0 and 0")
    ids = [*tokenizer.start_of_document, *tokenizer.encode(prompt)]
    if not ids:
        raise RecipeError("the prompt is empty; give at least one character")
    # On one device, wherever it was trained: a single row has nothing to be split over. By way of the host, since moving
    # an array to a device that it is on already would leave the training mesh in its type.
    model, state = jax.tree.map(lambda leaf: jax.device_put(np.asarray(leaf), jax.devices()[0]), (model, state))
    top_k = min(top_k, model.config.vocab_size)
    new = sample(
        model,
        jnp.asarray([ids], jnp.int32),
        tokens,
        jax.random.key(seed),
        temperature=temperature,
        top_k=top_k,
        state=state,
    )
    new = np.asarray(new)[0].tolist()
    end = tokenizer.end_of_document
    return tokenizer.decode(new[: new.index(end)] if end in new else new)
