"""One layer of released sizes: as close to `transformers` in float64 as `transformers` in float32 is, in both dtypes."""

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import transformers
from huggingface_examples import EAGER, abstract
from in_float64 import InFloat64, widened

from panax.adapters.huggingface import config_from, load
from panax.layers import Context
from panax.models import DecoderTask, compute_logits
from panax.models.decoder.model import layer_state

pytestmark = pytest.mark.slow

ROWS, LENGTH, VOCABULARY = 2, 48, 512
FEW: dict[str, Any] = {"num_experts": 8, "num_local_experts": 8, "n_routed_experts": 8}
NET_AND_ATTENTION: dict[str, Any] = {"num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"]}
"""`transformers` computes no model of delta nets alone."""

WIDTHS: dict[str, dict[str, Any]] = {
    "arcee": {}, "cohere": {}, "cohere2": {}, "deepseek_v2": {"num_experts_per_tok": 6, "first_k_dense_replace": 0},
    "deepseek_v3": {"first_k_dense_replace": 0, "n_group": 1, "topk_group": 1}, "ernie4_5": {}, "exaone4": {}, "gemma": {},
    "gemma2": {}, "gemma3_text": {}, "glm": {}, "glm4": {}, "gpt_neox": {}, "gpt_oss": {}, "granite": {}, "granitemoe": {},
    "helium": {}, "hunyuan_v1_dense": {"head_dim": 128}, "llama": {}, "mistral": {}, "mixtral": {"num_local_experts": 4},
    "nemotron": {"num_key_value_heads": 8}, "olmo2": {}, "olmo3": {}, "olmoe": {}, "phi3": {}, "qwen2": {}, "qwen2_moe": {},
    "qwen3": {}, "qwen3_5_text": NET_AND_ATTENTION, "qwen3_moe": {},
    "qwen3_next": {**NET_AND_ATTENTION, "num_experts_per_tok": 4}, "seed_oss": {}, "smollm3": {}, "stablelm": {},
    "starcoder2": {},
}  # fmt: skip
"""Settings beside those that `transformers` has by default, which are the widths of one of the released members."""


def settings(name: str) -> Any:
    """The default settings with one layer, few words, and eight experts."""
    cls = transformers.models.auto.configuration_auto.CONFIG_MAPPING[name]
    default = cls()
    few = {key: value for key, value in FEW.items() if getattr(default, key, None) is not None}
    ids = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
    return cls(**{"num_hidden_layers": 1, "vocab_size": VOCABULARY, **ids, **few, **WIDTHS[name]})


@pytest.mark.parametrize("name", WIDTHS)
def test_one_layer_of_a_released_width(name: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    config = settings(name)
    theirs = transformers.AutoModelForCausalLM.from_config(config, **EAGER).eval()
    with torch.no_grad():
        for value in theirs.parameters():
            # Norms and biases too; matrices by so much as is small beside what they hold.
            value.add_(0.1 * torch.randn_like(value) if value.ndim == 1 else 0.002 * torch.randn_like(value))
    theirs.save_pretrained(tmp_path)
    tokens = np.random.default_rng(0).integers(0, VOCABULARY, (ROWS, LENGTH)).astype(np.int32)
    token_ids = torch.from_numpy(tokens).long()
    with torch.no_grad():
        with InFloat64():
            truth = widened(config, theirs)(token_ids).logits.numpy()
        reference = {
            "float32": theirs(token_ids).logits.numpy(),
            "bfloat16": theirs.to(torch.bfloat16)(token_ids).logits.float().numpy(),
        }
    task = DecoderTask(model=config_from(tmp_path))
    params, state = load(tmp_path, task, *abstract(task))
    assert task.model.embed >= 1024 and task.model.num_layers == config.num_hidden_layers
    place = jnp.broadcast_to(jnp.arange(LENGTH, dtype=jnp.int32), (ROWS, LENGTH))
    sizes = np.linalg.norm(truth, axis=-1)
    for dtype, factor in (("float32", 2.0), ("bfloat16", 1.5)):

        @jax.jit
        def logits(params: Any, dtype: str = dtype) -> jax.Array:
            context = Context(place)
            hidden, _ = params(jnp.asarray(tokens), context, dtype=jnp.dtype(dtype), state=layer_state(state))
            return compute_logits(params, hidden)

        ours = np.asarray(logits(params), np.float32)
        # By the median over positions: routers that decide otherwise, which either do, move a few of them far.
        distances = [np.median(np.linalg.norm(x - truth, axis=-1) / sizes) for x in (ours, reference[dtype])]
        print(f"{name} {dtype}: {distances[0]:.1e}, of transformers {distances[1]:.1e}")
        assert distances[0] <= factor * distances[1] + 1e-7
