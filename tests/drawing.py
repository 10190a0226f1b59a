"""Models for tests: drawn with little optimization, which takes a third of the time, and continued greedily."""

from collections.abc import Callable
from typing import Any

import jax
import numpy as np


def drawn(build: Callable[[jax.Array], Any], seed: int = 0) -> Any:
    """What `build` makes of the key of a seed; bitwise what it makes with all optimization, since Panax's drawing is exact."""
    return jax.jit(build, compiler_options={"xla_backend_optimization_level": 1})(jax.random.key(seed))


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
