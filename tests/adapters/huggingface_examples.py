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

from panax.adapters.huggingface import config_from, load
from panax.layers import Context
from panax.models import Decoder, DecoderTask, compute_logits

torch.set_num_threads(2)
transformers.utils.logging.disable_progress_bar()

FAMILIES = ("gpt2", "llama", "qwen3", "gemma2", "mixtral", "qwen3_moe", "deepseek_v3", "dbrx", "mamba2", "bamba")
MIXTURES = FAMILIES[4:8]
ROWS, LENGTH, VOCABULARY = 2, 24, 96
EAGER = {"attn_implementation": "eager", "experts_implementation": "eager"}
DOCUMENTS = (10, 14)
"""Two documents that fill one row when packed."""

COMMON = {"vocab_size": VOCABULARY, "bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
ROTARY = {
    **COMMON,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
SCALED = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
FINE = {"moe_intermediate_size": 16, "num_experts_per_tok": 2}
LATENT = {"q_lora_rank": 24, "kv_lora_rank": 16, "qk_rope_head_dim": 4, "qk_nope_head_dim": 8, "v_head_dim": 8}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 500.0,
    "factor": 4.0,
    "mscale": 2.0,
    "mscale_all_dim": 1.0,
    "beta_fast": 4.0,
    "beta_slow": 1.0,
    "original_max_position_embeddings": 16,
}


def tiny(family: str) -> Any:
    """Its configuration, every part that is particular to the family at work on 24 tokens."""
    if family == "gpt2":
        sizes = {"n_positions": 64, "n_embd": 32, "n_layer": 4, "n_head": 4}
        return transformers.GPT2Config(**COMMON, **sizes, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)
    if family == "llama":
        return transformers.LlamaConfig(**ROTARY, num_hidden_layers=4, rms_norm_eps=1e-5, rope_parameters=SCALED)
    if family == "qwen3":
        return transformers.Qwen3Config(
            **ROTARY, num_hidden_layers=3, head_dim=16, tie_word_embeddings=True, attention_bias=True
        )
    if family == "mixtral":
        return transformers.MixtralConfig(**ROTARY, num_hidden_layers=2, num_local_experts=4, num_experts_per_tok=2)
    if family == "dbrx":
        # The positions' base twice: `transformers` reads one, a release has the other.
        return transformers.DbrxConfig(
            **COMMON,
            d_model=32,
            n_heads=4,
            n_layers=2,
            max_seq_len=64,
            attn_config={"kv_n_heads": 2, "clip_qkv": 1.5, "rope_theta": 500.0},
            ffn_config={"ffn_hidden_size": 24, "moe_num_experts": 4, "moe_top_k": 2, "moe_jitter_eps": None},
            rope_parameters={"rope_type": "default", "rope_theta": 500.0},
        )
    if family == "qwen3_moe":
        # The first layer is dense, and of the others every second one.
        return transformers.Qwen3MoeConfig(
            **ROTARY,
            **FINE,
            num_hidden_layers=5,
            head_dim=16,
            num_experts=8,
            norm_topk_prob=False,
            decoder_sparse_step=2,
        )
    if family == "deepseek_v3":
        return transformers.DeepseekV3Config(
            **{**ROTARY, "num_key_value_heads": 4},
            **FINE,
            **LATENT,
            num_hidden_layers=3,
            first_k_dense_replace=1,
            n_routed_experts=8,
            n_shared_experts=2,
            n_group=4,
            topk_group=2,
            rope_parameters=YARN,
        )
    if family == "deepseek_v3_direct":
        # As DeepSeek-V2-Lite has it: queries come from the residual stream itself.
        widths = {**LATENT, "q_lora_rank": None}
        return transformers.DeepseekV3Config(
            **{**ROTARY, "num_key_value_heads": 4},
            **widths,
            num_hidden_layers=2,
            first_k_dense_replace=2,
            rope_interleave=False,
        )
    if family == "mamba2":
        return transformers.Mamba2Config(
            **COMMON,
            hidden_size=32,
            num_hidden_layers=3,
            num_heads=8,
            head_dim=8,
            n_groups=2,
            state_size=16,
            tie_word_embeddings=True,
        )
    if family == "bamba":
        return transformers.BambaConfig(
            **ROTARY,
            num_hidden_layers=2,
            attn_layer_indices=[1],
            mamba_n_heads=8,
            mamba_n_groups=2,
            mamba_d_state=16,
        )
    return transformers.Gemma2Config(
        **ROTARY,
        num_hidden_layers=3,
        head_dim=16,
        sliding_window=8,
        query_pre_attn_scalar=24,
        # Small enough to bend scores and logits of this size.
        attn_logit_softcapping=2.0,
        final_logit_softcapping=3.0,
    )


class Example(NamedTuple):
    """One family: its model in `transformers`, the folder it was saved to, and the same loaded here."""

    family: str
    theirs: Any
    folder: Path
    task: DecoderTask
    params: Decoder
    state: dict[str, jax.Array]


@functools.cache
def make_example(family: str, parent: Path) -> Example:
    torch.manual_seed(0)
    theirs = transformers.AutoModelForCausalLM.from_config(tiny(family), **EAGER).eval()
    biases = [value for name, value in theirs.named_buffers() if name.endswith("e_score_correction_bias")]
    with torch.no_grad():
        # Biases and norms too, so that none is neutral.
        for value in [*theirs.parameters(), *biases]:
            value.add_(0.15 * torch.randn_like(value))
    folder = parent / family
    theirs.save_pretrained(folder)
    task = DecoderTask(model=config_from(folder))
    return Example(family, theirs, folder, task, *load(folder, task, *abstract(task)))


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
    hidden, _ = params(tokens, Context(position, segment), dtype=jnp.float32, state=state.get("router_bias"))
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
