"""The engine's likeliest tokens, from caches of each layer, are those of `transformers`."""

from pathlib import Path

import pytest
import torch
from family_examples import EXAMPLES
from huggingface_examples import make_example, tokens

from panax.generate import GenerationEngine, GenerationRequest, Sampling

FEW = ("falcon_new",)
"""Those of the full tier."""
NEW_TOKENS = 10
PROMPTS = (3, 11)
"""Lengths of prompts: shorter than a chunk, and one that ends within the second."""


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.full if name in FEW else pytest.mark.slow) for name in EXAMPLES]
)
def test_the_likeliest_tokens_are_theirs(name: str, folder_of_examples: Path) -> None:
    example = make_example(name, folder_of_examples)
    engine = GenerationEngine(example.task.incremental_model(example.params, example.state), rows=2, chunk=8)
    prompts = [tokens()[row, :length].tolist() for row, length in enumerate(PROMPTS)]
    sampling = Sampling(tokens=NEW_TOKENS, temperature=0.0)
    found = engine.generate([GenerationRequest(tuple(prompt), sampling) for prompt in prompts])
    for prompt, completion in zip(prompts, found, strict=True):
        row = torch.tensor([prompt])
        with torch.no_grad():
            for _ in range(NEW_TOKENS):
                row = torch.cat([row, example.theirs(row, use_cache=False).logits[:, -1:].argmax(-1)], dim=1)
        assert list(completion.ids) == row[0, len(prompt) :].tolist()
