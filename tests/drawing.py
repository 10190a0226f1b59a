"""Models for tests: drawn by one program, and continued greedily."""

from collections.abc import Callable
from typing import Any

import jax
import numpy as np


def drawn(build: Callable[[jax.Array], Any], seed: int = 0) -> Any:
    """What `build` makes of the key of a seed, compiled without optimization (conftest.py), which takes half as long as the
    first level does; bitwise what it makes with all optimization, since Panax's drawing is exact."""
    return jax.jit(build)(jax.random.key(seed))


def blank(build: Callable[[jax.Array], Any]) -> Any:
    """Zeros in the shapes of what `build` makes of a key: for a test that looks at no value, since nothing is compiled."""
    return jax.tree.map(lambda leaf: np.zeros(leaf.shape, leaf.dtype), jax.eval_shape(build, jax.random.key(0)))


def generate_greedily(model, prompts, count, state=None, *, chunk=4):
    """Return the likeliest tokens after each prompt, [row, token]; all rows at once, prompts in chunks."""
    # Most tests that draw a model don't generate.
    from panax.generate import GenerationEngine, GenerationRequest, Sampling
    from panax.models.decoder.incremental import IncrementalDecoder

    rows, length = prompts.shape
    engine = GenerationEngine(
        IncrementalDecoder.create(model, state or {}, "float32"), rows=rows, length=length + count, chunk=chunk
    )
    settings = Sampling(tokens=count, temperature=0.0)
    answers = engine.generate([GenerationRequest(tuple(prompt.tolist()), settings) for prompt in np.asarray(prompts)])
    return np.array([answer.ids for answer in answers], np.int32)
