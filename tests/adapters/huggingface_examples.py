"""Tiny random models of each family, made by `transformers`, and what it computes with them."""

import functools
import warnings
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import torch
    import transformers

from family_examples import EXAMPLES, VOCABULARY

from panax.adapters.huggingface import config_from, load
from panax.layers import Context
from panax.models import Decoder, DecoderTask, compute_logits
from panax.models.decoder.model import layer_state

torch.set_num_threads(2)
transformers.utils.logging.disable_progress_bar()

FAMILIES = ("gpt2", "llama", "qwen3", "gemma2", "mixtral", "qwen3_moe", "deepseek_v3", "dbrx", "mamba2", "bamba")
"""The examples of the default suite."""
OTHERS = tuple(name for name in EXAMPLES if name not in FAMILIES)
"""Those of the full tier."""
MIXTURES = FAMILIES[4:8]
ROWS, LENGTH = 2, 24
EAGER = {"attn_implementation": "eager", "experts_implementation": "eager"}
DOCUMENTS = (10, 14)
"""Two documents that fill one row when packed."""


def tiny(name: str) -> Any:
    """The configuration of an example."""
    model_type, settings = EXAMPLES[name]
    return transformers.models.auto.configuration_auto.CONFIG_MAPPING[model_type](**settings)


CANCELED = dict.fromkeys(("opt", "llama4_text"), (".self_attn.k_proj.bias", ".self_attn.v_proj.bias"))
"""Endings of tensors with gradients that are rounding errors alone, and of those next to which they are compared: without a
rotation, a bias of keys adds the same to all scores of a query."""


def with_joined(name: str, tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Join gradients that cancel with others of their layer."""
    if name not in CANCELED:
        return tensors
    end, other = CANCELED[name]
    joined = {
        key: np.concatenate([value, tensors[key.removesuffix(other) + end]]) if key.endswith(other) else value
        for key, value in tensors.items()
    }
    return {key: value for key, value in joined.items() if not key.endswith(end)}


class Example(NamedTuple):
    """One family: its model in `transformers`, the folder it was saved to, and the same loaded here."""

    name: str
    family: str
    theirs: Any
    folder: Path
    task: DecoderTask
    params: Decoder
    state: dict[str, jax.Array]


@functools.cache
def make_example(name: str, parent: Path) -> Example:
    torch.manual_seed(0)
    theirs = transformers.AutoModelForCausalLM.from_config(tiny(name), **EAGER).eval()
    biases = [
        value for key, value in theirs.named_buffers() if key.endswith(("e_score_correction_bias", "expert_bias"))
    ]
    with torch.no_grad():
        # Biases and norms too, so that none is neutral.
        for value in [*theirs.parameters(), *biases]:
            value.add_(0.15 * torch.randn_like(value))
    folder = parent / name
    theirs.save_pretrained(folder)
    task = DecoderTask(model=config_from(folder))
    return Example(name, EXAMPLES[name][0], theirs, folder, task, *load(folder, task, *abstract(task)))


def reloaded(folder: Path) -> Any:
    """What `transformers` makes of a folder."""
    return transformers.AutoModelForCausalLM.from_pretrained(folder, **EAGER).eval()


def abstract(task: DecoderTask) -> tuple[Decoder, dict[str, Any]]:
    """Parameters and model state."""
    return jax.eval_shape(task.init, jax.random.key(0))


def tokens(seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, VOCABULARY, (ROWS, LENGTH)).astype(np.int32)


@jax.jit
def our_logits(
    params: Decoder, state: dict[str, jax.Array], tokens: jax.Array, position: jax.Array, segment: jax.Array | None
) -> jax.Array:
    hidden, _ = params(tokens, Context(position, segment), dtype=jnp.float32, state=layer_state(state))
    return compute_logits(params, hidden)


def their_logits(model: Any, tokens: np.ndarray) -> np.ndarray:
    with torch.no_grad():
        return model(torch.from_numpy(tokens).long()).logits.numpy()


def positions() -> np.ndarray:
    return np.tile(np.arange(LENGTH, dtype=np.int32), (ROWS, 1))


def apart(ours: Any, theirs: Any) -> float:
    """How far two arrays are from each other, as a part of the second one's norm."""
    assert ours.shape == theirs.shape
    size = float(np.linalg.norm(theirs))
    assert size > 0
    return float(np.linalg.norm(np.asarray(ours) - np.asarray(theirs))) / size
