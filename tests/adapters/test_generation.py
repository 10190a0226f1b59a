"""Generation with the cache takes the tokens that a whole pass finds likeliest, and that `transformers` takes."""

from pathlib import Path

import jax
import numpy as np
import pytest
import torch
from drawing import drawn, generate_greedily
from huggingface_examples import LENGTH, OTHERS, ROWS, Example, make_example, our_logits, positions, tokens

from panax.models import Decoder, DecoderConfig

PROMPT = 10
GENERATED = LENGTH - PROMPT


def test_greedy_is_the_argmax_of_the_whole_pass() -> None:
    config = DecoderConfig(
        vocab_size=96, max_length=64, embed=32, num_layers=3, heads=4, kv_heads=2, ffn=48, windows=(6, 0), qk_norm=True
    )
    model = drawn(lambda key: Decoder.build(key, config))
    # Larger than they are drawn, so that what a layer says is heard above the token's own embedding.
    model = jax.tree.map(lambda x: x * 3.0 if x.ndim > 2 else x, model)
    prompt = tokens()[:, :PROMPT]
    generated = generate_greedily(model, prompt, GENERATED)
    row = np.concatenate([np.asarray(prompt), generated], axis=1)
    likeliest = np.asarray(our_logits(model, {}, row, positions(), None)).argmax(-1)
    assert np.array_equal(generated, likeliest[:, PROMPT - 1 : -1])
    assert len(np.unique(generated)) > 5


@pytest.mark.parametrize("name", ["gemma2", "qwen3_moe", "deepseek_v3"])
def test_greedy_is_what_transformers_generates(name: str, folder_of_examples: Path) -> None:
    assert len(np.unique(greedy(make_example(name, folder_of_examples)))) > 5


@pytest.mark.slow
@pytest.mark.parametrize("name", OTHERS)
def test_greedy_of_the_other_families(name: str, folder_of_examples: Path) -> None:
    # Some of these small models repeat themselves; their logits are checked to depend on positions.
    assert greedy(make_example(name, folder_of_examples)).shape == (ROWS, GENERATED)


def greedy(example: Example) -> np.ndarray:
    """The likeliest tokens, which are those of `transformers`."""
    prompt = tokens()[:, :PROMPT]
    ours = generate_greedily(example.params, prompt, GENERATED, example.state)
    ids = torch.from_numpy(prompt).long()
    theirs = example.theirs.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=GENERATED, do_sample=False, pad_token_id=0
    )
    assert ours.shape == (ROWS, GENERATED)
    assert np.array_equal(ours, theirs[:, PROMPT:].numpy())
    return ours
