"""Decoders of released models under heads: a classifier of `transformers`, and a decoder alone."""

import dataclasses
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import transformers
from huggingface_examples import VOCABULARY, abstract, apart, make_example, tiny
from test_huggingface_parity import TOLERANCE

from panax.adapters.huggingface import config_from, load
from panax.core import RecipeError
from panax.layers import run_stacks
from panax.models import TextClassifierTask, TextEmbedderTask

ROWS, LENGTH, CLASSES = 4, 20, 5


def texts() -> tuple[np.ndarray, np.ndarray]:
    """Tokens, and 0 for padding."""
    rng = np.random.default_rng(0)
    real = np.arange(LENGTH)[None] < np.asarray([[20], [7], [13], [1]])
    return (rng.integers(1, VOCABULARY, (ROWS, LENGTH)) * real).astype(np.int32), real.astype(np.int32)


@pytest.mark.parametrize("name", ["llama", "qwen3", pytest.param("gemma2", marks=pytest.mark.full)])
def test_a_classifier_scores_as_in_transformers(name: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    config = tiny(name)
    config.num_labels, config.pad_token_id = CLASSES, 0
    theirs = transformers.AutoModelForSequenceClassification.from_config(config, attn_implementation="eager").eval()
    with torch.no_grad():
        for value in theirs.parameters():
            value.add_(0.1 * torch.randn_like(value))
    theirs.save_pretrained(tmp_path)
    tokens, segment = texts()
    with torch.no_grad():
        wanted = theirs(torch.from_numpy(tokens).long(), torch.from_numpy(segment).long()).logits.numpy()
    task = TextClassifierTask(model=config_from(tmp_path), classes=CLASSES)
    params, _ = load(tmp_path, task, *abstract(task))
    names = {"tokens": tokens, "segment": segment, "row": np.arange(ROWS), "label": np.zeros(ROWS, np.int32)}
    batch = {name: jnp.asarray(value) for name, value in names.items()}

    @jax.jit
    def scores(params):
        context = task.context(batch, jax.random.key(0), False)
        items, _ = run_stacks(task.stacks(params), task.enter(params, batch, context), context, "none", None)
        return task.scores(params, items, task.targets(batch)["pooling"])

    assert apart(np.asarray(scores(params)), wanted) < TOLERANCE


def test_a_head_for_other_classes_stays_as_it_was_drawn(folder_of_examples: Path) -> None:
    example = make_example("llama", folder_of_examples)
    task = TextClassifierTask(model=config_from(example.folder), classes=3)
    drawn, state = task.init(jax.random.key(1))
    loaded, _ = load(example.folder, task, drawn, state)
    np.testing.assert_array_equal(loaded.head.w, drawn.head.w)
    pairs = zip(jax.tree.leaves(loaded.decoder.stacks), jax.tree.leaves(example.params.stacks), strict=True)
    for ours, theirs in pairs:
        np.testing.assert_array_equal(ours, theirs)


def test_an_embedder_begins_with_a_released_decoder(folder_of_examples: Path) -> None:
    example = make_example("llama", folder_of_examples)
    task = TextEmbedderTask(model=config_from(example.folder), dims=(8,))
    params, _ = load(example.folder, task, *abstract(task))
    assert params.head is None and params.decoder.head is None
    np.testing.assert_array_equal(params.decoder.embedding.table, example.params.embedding.table)
    other = dataclasses.replace(task, model=dataclasses.replace(task.model, embed=16, head_dim=8))
    with pytest.raises(RecipeError, match="is not the task's"):
        load(example.folder, other, *abstract(other))
