"""config.json as it was released, and as `transformers` writes it today, is the preset of that name."""

import json
from pathlib import Path

import pytest
import torch
import transformers

from panax.adapters.huggingface import config_from
from panax.adapters.huggingface.expressing import config_json, effective
from panax.core import CheckpointError, RecipeError
from panax.layers import Rotary
from panax.models import PRESETS, PUBLISHED_PARAMETERS


def gpt2(embed: int, layers: int, heads: int) -> dict:
    return {
        "model_type": "gpt2",
        "architectures": ["GPT2LMHeadModel"],
        "activation_function": "gelu_new",
        "attn_pdrop": 0.1,
        "embd_pdrop": 0.1,
        "resid_pdrop": 0.1,
        "layer_norm_epsilon": 1e-05,
        "n_ctx": 1024,
        "n_embd": embed,
        "n_head": heads,
        "n_layer": layers,
        "n_positions": 1024,
        "vocab_size": 50257,
    }


def llama(
    embed: int, layers: int, heads: int, ffn: int, *, factor: float | None = None, tied: bool = False, **more
) -> dict:
    scaling = {
        "factor": factor,
        "high_freq_factor": 4.0,
        "low_freq_factor": 1.0,
        "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    }
    return {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "attention_bias": False,
        "hidden_act": "silu",
        "hidden_size": embed,
        "intermediate_size": ffn,
        "max_position_embeddings": 8192 if factor is None else 131072,
        "num_attention_heads": heads,
        "num_hidden_layers": layers,
        "num_key_value_heads": 8,
        "pretraining_tp": 1,
        "rms_norm_eps": 1e-05,
        "rope_scaling": None if factor is None else scaling,
        "rope_theta": 500000.0,
        "tie_word_embeddings": tied,
        "torch_dtype": "bfloat16",
        "vocab_size": 128256,
        **more,
    }


def qwen3(embed: int, layers: int, heads: int, ffn: int, *, tied: bool) -> dict:
    return {
        "model_type": "qwen3",
        "architectures": ["Qwen3ForCausalLM"],
        "attention_bias": False,
        "head_dim": 128,
        "hidden_act": "silu",
        "hidden_size": embed,
        "intermediate_size": ffn,
        "max_position_embeddings": 40960,
        "max_window_layers": layers,
        "num_attention_heads": heads,
        "num_hidden_layers": layers,
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-06,
        "rope_scaling": None,
        "rope_theta": 1000000,
        "sliding_window": None,
        "tie_word_embeddings": tied,
        "use_sliding_window": False,
        "vocab_size": 151936,
    }


def gemma2(embed: int, layers: int, heads: int, kv_heads: int, head_dim: int, ffn: int, scalar: int) -> dict:
    return {
        "model_type": "gemma2",
        "architectures": ["Gemma2ForCausalLM"],
        "attention_bias": False,
        "attn_logit_softcapping": 50.0,
        "cache_implementation": "hybrid",
        "final_logit_softcapping": 30.0,
        "head_dim": head_dim,
        "hidden_act": "gelu_pytorch_tanh",
        "hidden_activation": "gelu_pytorch_tanh",
        "hidden_size": embed,
        "intermediate_size": ffn,
        "max_position_embeddings": 8192,
        "num_attention_heads": heads,
        "num_hidden_layers": layers,
        "num_key_value_heads": kv_heads,
        "query_pre_attn_scalar": scalar,
        "rms_norm_eps": 1e-06,
        "rope_theta": 10000.0,
        "sliding_window": 4096,
        "vocab_size": 256000,
    }


def mixtral(embed: int, layers: int, heads: int, ffn: int, length: int) -> dict:
    return {
        "model_type": "mixtral",
        "architectures": ["MixtralForCausalLM"],
        "hidden_act": "silu",
        "hidden_size": embed,
        "intermediate_size": ffn,
        "max_position_embeddings": length,
        "num_attention_heads": heads,
        "num_experts_per_tok": 2,
        "num_hidden_layers": layers,
        "num_key_value_heads": 8,
        "num_local_experts": 8,
        "output_router_logits": False,
        "rms_norm_eps": 1e-05,
        "rope_theta": 1000000.0,
        "router_aux_loss_coef": 0.02,
        "sliding_window": None,
        "tie_word_embeddings": False,
        "vocab_size": 32000,
    }


def qwen3_moe(embed: int, layers: int, heads: int, ffn: int, expert_ffn: int) -> dict:
    return {
        **qwen3(embed, layers, heads, ffn, tied=False),
        "model_type": "qwen3_moe",
        "architectures": ["Qwen3MoeForCausalLM"],
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "moe_intermediate_size": expert_ffn,
        "norm_topk_prob": True,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "num_key_value_heads": 4,
        "router_aux_loss_coef": 0.001,
    }


def deepseek(model_type: str, vocab_size: int, length: int, heads: int, dense: int, rope: dict, **moe) -> dict:
    return {
        "model_type": model_type,
        "architectures": ["DeepseekV3ForCausalLM"],
        "attention_bias": False,
        "first_k_dense_replace": dense,
        "hidden_act": "silu",
        "hidden_size": 7168,
        "intermediate_size": 18432,
        "kv_lora_rank": 512,
        "max_position_embeddings": length,
        "moe_intermediate_size": 2048,
        "moe_layer_freq": 1,
        "n_shared_experts": 1,
        "norm_topk_prob": True,
        "num_attention_heads": heads,
        "num_experts_per_tok": 8,
        "num_hidden_layers": 61,
        "num_key_value_heads": heads,
        "q_lora_rank": 1536,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "rms_norm_eps": 1e-06,
        "rope_scaling": {
            "beta_slow": 1,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
            "original_max_position_embeddings": 4096,
            "type": "yarn",
            **rope["scaling"],
        },
        "rope_theta": rope["theta"],
        "scoring_func": "sigmoid",
        "tie_word_embeddings": False,
        "topk_method": "noaux_tc",
        "v_head_dim": 128,
        "vocab_size": vocab_size,
        **moe,
    }


def dbrx() -> dict:
    return {
        "model_type": "dbrx",
        "architectures": ["DbrxForCausalLM"],
        "attn_config": {"clip_qkv": 8, "kv_n_heads": 8, "model_type": "", "rope_theta": 500000},
        "d_model": 6144,
        "emb_pdrop": 0.0,
        "ffn_config": {
            "ffn_hidden_size": 10752,
            "model_type": "",
            "moe_jitter_eps": 0.01,
            "moe_loss_weight": 0.05,
            "moe_num_experts": 16,
            "moe_top_k": 4,
        },
        "max_seq_len": 32768,
        "n_heads": 48,
        "n_layers": 40,
        "resid_pdrop": 0.0,
        "router_aux_loss_coef": 0.05,
        "tie_word_embeddings": False,
        "vocab_size": 100352,
    }


def released_mamba2(width: int, layers: int) -> dict:
    return {
        "model_type": "mamba2",
        "vocab_size": 50288,
        "hidden_size": width,
        "num_hidden_layers": layers,
        "num_heads": width // 32,
        "head_dim": 64,
        "n_groups": 1,
        "state_size": 128,
        "conv_kernel": 4,
        "expand": 2,
        "use_bias": False,
        "use_conv_bias": True,
        "hidden_act": "silu",
        "layer_norm_epsilon": 1e-5,
        "time_step_limit": [0.0, float("inf")],
        "residual_in_fp32": True,
        "tie_word_embeddings": True,
    }


RELEASED = {
    "dbrx": dbrx(),
    "gpt2": gpt2(768, 12, 12),
    "gpt2_medium": gpt2(1024, 24, 16),
    "gpt2_large": gpt2(1280, 36, 20),
    "gpt2_xl": gpt2(1600, 48, 25),
    "llama3_8b": llama(4096, 32, 32, 14336),
    "llama3_70b": llama(8192, 80, 64, 28672),
    "llama3_405b": llama(16384, 126, 128, 53248, factor=8.0, mlp_bias=False),
    "llama3_1b": llama(2048, 16, 32, 8192, factor=32.0, tied=True, head_dim=64),
    "llama3_3b": llama(3072, 28, 24, 8192, factor=32.0, tied=True, head_dim=128),
    "qwen3_0.6b": qwen3(1024, 28, 16, 3072, tied=True),
    "qwen3_1.7b": qwen3(2048, 28, 16, 6144, tied=True),
    "qwen3_4b": qwen3(2560, 36, 32, 9728, tied=True),
    "qwen3_8b": qwen3(4096, 36, 32, 12288, tied=False),
    "qwen3_14b": qwen3(5120, 40, 40, 17408, tied=False),
    "qwen3_32b": qwen3(5120, 64, 64, 25600, tied=False),
    "gemma2_2b": gemma2(2304, 26, 8, 4, 256, 9216, 256),
    "gemma2_9b": gemma2(3584, 42, 16, 8, 256, 14336, 256),
    "gemma2_27b": gemma2(4608, 46, 32, 16, 128, 36864, 144),
    "mixtral_8x7b": mixtral(4096, 32, 32, 14336, 32768),
    "mixtral_8x22b": mixtral(6144, 56, 48, 16384, 65536),
    "qwen3_30b_a3b": qwen3_moe(2048, 48, 32, 6144, 768),
    "qwen3_235b_a22b": qwen3_moe(4096, 94, 64, 12288, 1536),
    "deepseek_v3": deepseek(
        "deepseek_v3",
        129280,
        163840,
        128,
        3,
        {"theta": 10000, "scaling": {"factor": 40, "beta_fast": 32}},
        n_routed_experts=256,
        n_group=8,
        topk_group=4,
        routed_scaling_factor=2.5,
    ),
    "kimi_k2": deepseek(
        "kimi_k2",
        163840,
        131072,
        64,
        1,
        {"theta": 50000.0, "scaling": {"factor": 32.0, "beta_fast": 1.0}},
        n_routed_experts=384,
        n_group=1,
        topk_group=1,
        routed_scaling_factor=2.827,
    ),
    "mamba2_130m": released_mamba2(768, 24),
    "mamba2_370m": released_mamba2(1024, 48),
    "mamba2_780m": released_mamba2(1536, 48),
    "mamba2_1.3b": released_mamba2(2048, 48),
    "mamba2_2.7b": released_mamba2(2560, 64),
    "bamba_9b": {
        "architectures": ["BambaForCausalLM"],
        "attn_layer_indices": [9, 18, 27],
        "attn_rotary_emb": 64,
        "hidden_act": "silu",
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "mamba_conv_bias": True,
        "mamba_d_conv": 4,
        "mamba_d_head": 64,
        "mamba_d_state": 128,
        "mamba_expand": 2,
        "mamba_n_groups": 1,
        "mamba_n_heads": 128,
        "mamba_proj_bias": False,
        "model_type": "bamba",
        "num_attention_heads": 32,
        "num_hidden_layers": 32,
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-05,
        "tie_word_embeddings": False,
        "vocab_size": 128256,
    },
}
"""The parts of each release's config.json that say what is computed; Mamba-2's as `transformers` has them."""


def write(folder: Path, raw: dict) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(raw))
    return folder


NEVER_RELEASED = {"mt_nlg_530b", "megatron_1t", "glam_64b_64e"}


@pytest.mark.parametrize("name", sorted(PRESETS.keys() - NEVER_RELEASED))
def test_released_configurations_are_the_presets(name: str, tmp_path) -> None:
    folder = write(tmp_path / "released", RELEASED[name])
    assert effective(config_from(folder)) == effective(PRESETS[name])
    if PRESETS[name].feed_forward is None:
        assert config_from(folder) == PRESETS[name]
    if name == "kimi_k2":
        # `transformers` knows this architecture by DeepSeek's name only.
        write(folder, {**RELEASED[name], "model_type": "deepseek_v3"})
    if name == "dbrx":
        # `transformers` 5 passes over the base of the positions that the release has, and writes another beside it.
        write(folder, {**RELEASED[name], "rope_theta": 500000})
    transformers.AutoConfig.from_pretrained(folder).save_pretrained(tmp_path / "written_today")
    assert config_from(tmp_path / "written_today") == config_from(folder)


@pytest.mark.parametrize(
    "name", ["mixtral_8x7b", "qwen3_30b_a3b", "deepseek_v3", "kimi_k2", "dbrx", "mamba2_130m", "bamba_9b"]
)
def test_transformers_counts_the_same_weights(name: str, tmp_path) -> None:
    _, raw = config_json(PRESETS[name], None)
    config = transformers.AutoConfig.from_pretrained(write(tmp_path / "folder", raw))
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    biases = [value for key, value in model.named_buffers() if key.endswith("e_score_correction_bias")]
    assert sum(value.numel() for value in [*model.parameters(), *biases]) == PUBLISHED_PARAMETERS[name]


@pytest.mark.parametrize("name", ["gpt2", "llama3_8b", "qwen3_0.6b", "gemma2_2b"])
def test_keys_that_are_left_out_mean_what_transformers_takes(name: str, tmp_path) -> None:
    written = {
        "model_type",
        "n_embd",
        "n_head",
        "n_layer",
        "n_positions",
        "vocab_size",
        "hidden_size",
        "intermediate_size",
    }
    written |= {"num_hidden_layers", "num_attention_heads", "max_position_embeddings"}
    if name.startswith(("qwen3", "gemma2")):
        # Here `transformers` has a number of its own, of one member; a release always says it.
        written |= {"num_key_value_heads"}
    folder = write(tmp_path / "short", {key: value for key, value in RELEASED[name].items() if key in written})
    transformers.AutoConfig.from_pretrained(folder).save_pretrained(tmp_path / "complete")
    assert config_from(folder) == config_from(tmp_path / "complete")


def test_sliding_windows_are_read_as_the_shortest_cycle(tmp_path) -> None:
    raw = RELEASED["gemma2_2b"]
    kinds = ["sliding_attention", "sliding_attention", "full_attention"]
    folder = write(tmp_path / "a", {**raw, "num_hidden_layers": 8, "layer_types": (3 * kinds)[:8]})
    assert config_from(folder).windows == (4096, 4096, 0)
    raw = {**RELEASED["qwen3_0.6b"], "use_sliding_window": True, "sliding_window": 512, "num_hidden_layers": 4}
    assert config_from(write(tmp_path / "b", {**raw, "max_window_layers": 3})).windows == (0, 0, 0, 512)
    assert config_from(write(tmp_path / "c", {**raw, "max_window_layers": 0})).windows == (512,)
    assert config_from(write(tmp_path / "d", {**raw, "use_sliding_window": False})).windows == (0,)


def test_rope_parameters_may_stand_in_either_place(tmp_path) -> None:
    raw = {**RELEASED["llama3_8b"]}
    del raw["rope_theta"], raw["rope_scaling"]
    assert config_from(write(tmp_path / "a", raw)).rotary == Rotary(theta=10_000.0)
    raw["rope_parameters"] = {"rope_theta": 7.0, "rope_type": "default"}
    assert config_from(write(tmp_path / "b", raw)).rotary == Rotary(theta=7.0)


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("llama3_8b", {"model_type": "lama"}, "model_type='lama'.*did you mean 'llama'"),
        ("llama3_8b", {"model_type": None, "architectures": ["T5Model"]}, r"architectures=\['T5Model'\]"),
        ("llama3_8b", {"hidden_act": "mish"}, "hidden_act='mish' in a llama model; expected one of silu"),
        ("llama3_8b", {"mlp_bias": True}, "mlp_bias=True in a llama model; the decoder computes mlp_bias=False only"),
        ("llama3_8b", {"hidden_size": "4096"}, "hidden_size='4096' in a llama model; expected a value of type int"),
        ("llama3_8b", {"num_key_value_heads": 5}, "heads=32 is not divisible by kv_heads=5"),
        ("llama3_8b", {"num_attention_heads": 0}, "heads=0; expected a positive number"),
        (
            "llama3_8b",
            {"rope_scaling": {"type": "linear", "factor": 2.0}},
            "rope_type='linear' is none of default, llama3",
        ),
        (
            "llama3_8b",
            {"rope_scaling": {"rope_type": "llama3", "factor": 2.0}},
            "low_freq_factor is None, expected a number",
        ),
        ("llama3_8b", {"rope_parameters": {"full_attention": {}}}, "expected one set of values for all layers"),
        ("llama3_8b", {"partial_rotary_factor": 0.5}, "partial_rotary_factor=0.5; it turns whole heads"),
        (
            "mamba2_130m",
            {"use_bias": True},
            "use_bias=True in a mamba2 model; the decoder computes use_bias=False only",
        ),
        ("mamba2_130m", {"time_step_limit": [0.0, 0.5]}, r"time_step_limit=\[0.0, 0.5\] in a mamba2 model"),
        ("mamba2_130m", {"hidden_act": "gelu"}, "hidden_act='gelu' in a mamba2 model"),
        ("mamba2_130m", {"expand": 3}, "expand=3 in a mamba2 model; times hidden_size=768 is not the 1536 features"),
        ("mamba2_130m", {"n_groups": 5}, "ssm_heads=24 is not divisible by ssm_groups=5"),
        ("bamba_9b", {"mamba_proj_bias": True}, "mamba_proj_bias=True in a bamba model"),
        ("bamba_9b", {"mamba_d_head": None}, "mamba_d_head=None in a bamba model; expected a whole number, or 'auto'"),
        ("bamba_9b", {"mamba_expand": "2"}, "mamba_expand='2' in a bamba model"),
        ("bamba_9b", {"head_dim": 64}, "head_dim=64 in a bamba model; expected hidden_size / num_attention_heads=128"),
        ("bamba_9b", {"attn_layer_indices": [9, 40]}, r"attention_layers=\(9, 40\); expected ascending numbers"),
        ("bamba_9b", {"attn_layer_indices": "9"}, "attn_layer_indices='9' in a bamba model; expected a list of layers"),
        ("llama3_8b", {"quantization_config": {"bits": 4}}, "quantization_config={'bits': 4}"),
        (
            "gemma2_2b",
            {"sliding_window": None},
            "sliding_window=None in a gemma2 model; .*expected the window's length",
        ),
        ("gemma2_2b", {"layer_types": ["chunked_attention"] * 26}, "'chunked_attention' is none of full_attention"),
        ("gemma2_2b", {"layer_types": ["full_attention"]}, "expected a list of 26"),
        ("gemma2_2b", {"use_bidirectional_attention": True}, "use_bidirectional_attention=True in a gemma2 model"),
        ("gpt2", {"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx=True"),
        ("mixtral_8x7b", {"sliding_window": 4096}, "sliding_window=4096 in a mixtral model; the decoder computes"),
        (
            "mixtral_8x7b",
            {"num_local_experts": "8"},
            "num_local_experts='8' in a mixtral model; expected a value of type int",
        ),
        ("mixtral_8x7b", {"num_experts_per_tok": 9}, "active=9; expected 1 to experts=8"),
        ("qwen3_30b_a3b", {"mlp_only_layers": [3]}, r"mlp_only_layers=\[3\] .*expected the first layers only"),
        ("dbrx", {"rope_theta": 10000.0}, r"attn_config.rope_theta=500000 .* rope_theta=10000.0.* make them equal"),
        (
            "dbrx",
            {"ffn_config": {"moe_normalize_expert_weights": 2.0}},
            r"ffn_config.moe_normalize_expert_weights=2.0 in a dbrx model; expected one of 1.0, None",
        ),
        ("dbrx", {"ffn_config": {"ffn_act_fn": {"name": "mish"}}}, "ffn_config.ffn_act_fn.name='mish'"),
        ("deepseek_v3", {"scoring_func": "softmax"}, "computes scoring_func='sigmoid' only"),
        (
            "deepseek_v3",
            {"kv_lora_rank": None},
            "kv_lora_rank=None in a deepseek_v3 model; expected a value of type int",
        ),
        ("deepseek_v3", {"v_head_dim": 256}, "value_dim=256 is more than a key's width"),
        ("deepseek_v3", {"rope_scaling": {"type": "llama3"}}, "rope_type='llama3' is none of default, yarn"),
        (
            "deepseek_v3",
            {"rope_scaling": {"type": "yarn", "factor": 4.0, "mscale_all_dim": 1.0}},
            "yarn with mscale_all_dim=1.0 and no mscale is unknown here",
        ),
    ],
)
def test_what_the_decoder_lacks_is_refused_by_name(name: str, change: dict, message: str, tmp_path) -> None:
    with pytest.raises(RecipeError, match=message) as error:
        config_from(write(tmp_path / "folder", {**RELEASED[name], **change}))
    assert str(tmp_path / "folder" / "config.json") in str(error.value)


def test_dense_layers_first_may_be_listed(tmp_path) -> None:
    folder = write(
        tmp_path / "folder", {**RELEASED["qwen3_30b_a3b"], "mlp_only_layers": [0, 1], "decoder_sparse_step": 3}
    )
    config = config_from(folder)
    assert config.mixture_layers[:2] == (2, 5)
    again = write(tmp_path / "again", config_json(config, None)[1])
    assert config_from(again) == config


def test_queries_may_come_from_the_residual_stream_itself(tmp_path) -> None:
    config = config_from(write(tmp_path / "folder", {**RELEASED["deepseek_v3"], "q_lora_rank": None}))
    assert config.latent.q_rank == 0
    assert config_json(config, None)[1]["q_lora_rank"] is None


def test_a_key_that_is_needed_is_named(tmp_path) -> None:
    raw = {key: value for key, value in RELEASED["llama3_8b"].items() if key != "hidden_size"}
    with pytest.raises(RecipeError, match="has no hidden_size"):
        config_from(write(tmp_path / "folder", raw))


def test_folders_without_a_configuration(tmp_path) -> None:
    with pytest.raises(CheckpointError, match=r"is no folder.*hf download"):
        config_from("openai-community/gpt2")
    with pytest.raises(CheckpointError, match=r"config.json can't be read"):
        config_from(tmp_path)
    for text in ("{", "[]", '"gpt2"'):
        (tmp_path / "config.json").write_text(text)
        with pytest.raises(CheckpointError, match=r"config\.json"):
            config_from(tmp_path)
