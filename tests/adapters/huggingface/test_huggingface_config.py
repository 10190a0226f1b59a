"""config.json as it was released, and as `transformers` writes it today, is the preset of that name."""

import json
from pathlib import Path

import pytest
import torch
import transformers
from released_configs import RELEASED

from panax.adapters.huggingface import config_from
from panax.adapters.huggingface.family_choice import resolve_defaults, to_config_json
from panax.core import CheckpointError, RecipeError
from panax.layers import Rotary
from panax.models import PRESETS, PUBLISHED_PARAMETERS


def write(folder: Path, raw: dict) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(raw))
    return folder


NEVER_RELEASED = {"mt_nlg_530b", "megatron_1t", "glam_64b_64e"}


@pytest.mark.parametrize("name", sorted(PRESETS.keys() - NEVER_RELEASED))
def test_released_configurations_are_the_presets(name: str, tmp_path) -> None:
    folder = write(tmp_path / "released", RELEASED[name])
    assert resolve_defaults(config_from(folder)) == resolve_defaults(PRESETS[name])
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
    "name",
    ["mixtral_8x7b", "qwen3_30b_a3b", "deepseek_v3", "kimi_k2", "dbrx", "gpt_oss_20b", "mamba2_130m", "bamba_9b"],
)
def test_transformers_counts_the_same_weights(name: str, tmp_path) -> None:
    _, raw = to_config_json(PRESETS[name], None)
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
        (
            "llama3_8b",
            {"model_type": "lama"},
            "model_type='lama'.*By its keys it is nearest to llama; it reads all of its keys",
        ),
        ("llama3_8b", {"model_type": None, "architectures": ["T5Model"]}, r"architectures=\['T5Model'\]"),
        ("llama3_8b", {"hidden_act": "mish"}, "hidden_act='mish' in a llama model; expected one of silu"),
        ("llama3_8b", {"mlp_bias": True}, "mlp_bias=True in a llama model; the decoder computes mlp_bias=False only"),
        ("llama3_8b", {"hidden_size": "4096"}, "hidden_size='4096' in a llama model; expected a value of type int"),
        ("llama3_8b", {"num_key_value_heads": 5}, "heads=32 is not divisible by kv_heads=5"),
        ("llama3_8b", {"num_attention_heads": 0}, "heads=0; expected a positive number"),
        (
            "llama3_8b",
            {"rope_scaling": {"type": "longrope", "factor": 2.0}},
            "rope_type='longrope' is not one of default, linear, dynamic, llama3, yarn",
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
            {"sliding_window": None, "layer_types": ["sliding_attention"] * 26},
            "sliding_window=None in a gemma2 model; .*expected the window's length",
        ),
        ("gemma2_2b", {"layer_types": ["chunked_attention"] * 26}, "'chunked_attention' is not one of full_attention"),
        ("gemma2_2b", {"layer_types": ["full_attention"]}, "expected a list of 26"),
        ("gemma2_2b", {"use_bidirectional_attention": True}, "use_bidirectional_attention=True in a gemma2 model"),
        ("gpt2", {"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx=True"),
        (
            "mixtral_8x7b",
            {"sliding_window": -1},
            "sliding_window=-1 in a mixtral model; .*expected the window's length",
        ),
        (
            "mixtral_8x7b",
            {"num_local_experts": "8"},
            "num_local_experts='8' in a mixtral model; expected a value of type int",
        ),
        ("mixtral_8x7b", {"num_experts_per_tok": 9}, "experts for each token; expected 1 to experts=8"),
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
        ("deepseek_v3", {"rope_scaling": {"type": "llama3"}}, "rope_type='llama3' is not one of default, yarn"),
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
    again = write(tmp_path / "again", to_config_json(config, None)[1])
    assert config_from(again) == config


def test_queries_may_come_from_the_residual_stream_itself(tmp_path) -> None:
    config = config_from(write(tmp_path / "folder", {**RELEASED["deepseek_v3"], "q_lora_rank": None}))
    assert config.latent.q_rank == 0
    assert to_config_json(config, None)[1]["q_lora_rank"] is None


def test_a_key_that_is_needed_is_named(tmp_path) -> None:
    raw = {key: value for key, value in RELEASED["llama3_8b"].items() if key != "hidden_size"}
    with pytest.raises(RecipeError, match="has no hidden_size"):
        config_from(write(tmp_path / "folder", raw))


def test_folders_without_a_configuration(tmp_path) -> None:
    with pytest.raises(CheckpointError, match=r"is not a folder.*hf download"):
        config_from("openai-community/gpt2")
    with pytest.raises(CheckpointError, match=r"config.json can't be read"):
        config_from(tmp_path)
    for text in ("{", "[]", '"gpt2"'):
        (tmp_path / "config.json").write_text(text)
        with pytest.raises(CheckpointError, match=r"config\.json"):
            config_from(tmp_path)
