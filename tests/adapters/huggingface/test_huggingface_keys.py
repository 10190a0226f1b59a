"""Each key of a family's config.json is read, refused, or known to change nothing that is computed here."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
from family_examples import EXAMPLES
from huggingface_examples import tiny

from panax.adapters.huggingface import config_from
from panax.adapters.huggingface.family_choice import resolve_defaults
from panax.core import RecipeError

GENERATION = {
    "use_cache", "bos_token_id", "eos_token_id", "pad_token_id",
    "sep_token_id", "cls_token_id", "is_encoder_decoder", "output_attentions",
    "output_hidden_states", "return_dict", "problem_type", "label2id",
    "id2label", "chunk_size_feed_forward", "cache_implementation", "task_specific_params",
    "prefix", "tokenizer_class", "logits_to_keep", "output_router_logits",
    "num_logits_to_keep", "eod_token_id", "use_bfloat16", "torchscript",
    "pruned_heads", "finetuning_task", "attention_softmax_in_fp32",
}  # fmt: skip
"""Keys of generation, of outputs and of other tasks than the next token."""

ROUNDING = {
    "dtype", "torch_dtype", "scale_attention_softmax_in_fp32", "residual_in_fp32", "chunk_size",
    "mamba_chunk_size", "use_mamba_kernels", "mamba_ssm_cache_dtype", "moe_shared_expert_overlap",
    "slow_but_exact", "attn_impl", "init_device", "reorder_and_upcast_attn", "rescale_prenorm_residual",
    "use_mambapy", "pretraining_tp", "enable_moe_fp32_combine",
}  # fmt: skip
"""Keys of the precision or the order of the same sums."""

TRAINING = {
    "initializer_range", "embedding_initializer_range", "attention_dropout", "attn_pdrop",
    "resid_pdrop", "embd_pdrop", "hidden_dropout", "residual_dropout",
    "embedding_dropout", "mtp_layers_block_type", "classifier_dropout", "router_aux_loss_coef", "router_jitter_noise",
    "summary_type", "summary_use_proj", "summary_activation", "summary_first_dropout",
    "summary_proj_to_labels", "z_loss_coefficient", "time_step_min", "time_step_max",
    "time_step_floor", "time_step_rank", "time_step_init_scheme", "num_nextn_predict_layers",
    "num_mtp_layers", "aux_loss_alpha", "seq_aux", "emb_pdrop",
    "moe_loss_weight", "moe_jitter_eps", "is_decoder", "init_std", "layerdrop", "dropout",
}  # fmt: skip
"""Keys of training, which the task has its own settings for."""

NAMES = {"architectures", "model_type", "transformers_version", "_name_or_path", "auto_map", "name_or_path"}
"""Keys that are not settings."""

DERIVED = {"qk_head_dim", "_sliding_window_pattern"}
"""Keys that `transformers` writes and computes from others when it reads them."""

UNUSED = {
    ("deepseek_v3", "head_dim"): "the rotated width of latent attention, which has a key of its own",
    ("deepseek_v3", "num_key_value_heads"): "latent attention has none",
    ("deepseek_v2", "head_dim"): "as of V3",
    ("deepseek_v2", "num_key_value_heads"): "as of V3",
    ("glm4_moe_lite", "num_key_value_heads"): "as of V3",
    ("glm4_moe_lite", "head_dim"): "as of V3",
    ("youtu", "num_key_value_heads"): "as of V3",
    ("youtu", "head_dim"): "as of V3",
    ("dbrx", "num_key_value_heads"): "derived from attn_config",
    ("dbrx", "hidden_size"): "in ffn_config; the model's width is d_model",
    ("gpt_bigcode", "num_key_value_heads"): "derived from multi_query",
    ("solar_open", "intermediate_size"): "no layer is dense",
    ("qwen3_5_moe_text", "intermediate_size"): "no layer is dense",
    ("nemotron_h", "sliding_window"): "no layer has a window, whatever the key",
    ("nemotron_h", "expand"): "the inner width is that of the heads",
    ("nemotron_h", "n_shared_experts"): "the shared expert has a width of its own",
    ("mpt", "learned_pos_emb"): "scores have linear biases in any case",
    ("mpt", "embedding_fraction"): "of gradients, and unused",
    ("mpt", "norm_type"): "all members have the same",
    ("cohere2", "head_dim"): "derived, whatever is said",
}
"""(family, key) to why it changes nothing in any member."""


MIXTURE = {
    "moe_intermediate_size", "moe_shared_expert_intermediate_size", "n_routed_experts", "norm_topk_prob", "num_experts_per_tok",
    "routed_scaling_factor", "n_group", "topk_group",
}  # fmt: skip
"""Keys of experts, of a family with members that have none."""


def is_overruled(raw: dict[str, Any], path: tuple[str, ...]) -> bool:
    """Whether another key of the same file leaves this one without a meaning."""
    key, kinds = path[-1], raw.get("layer_types")
    if key in ("max_window_layers", "sliding_window_pattern", "no_rope_layer_interval", "full_attn_idxs"):
        return kinds is not None
    if key in ("sliding_window", "use_sliding_window"):
        return raw.get("use_sliding_window") in (None, False) and "sliding_attention" not in (kinds or [])
    if key in ("num_kv_heads", "multi_query") and "new_decoder_architecture" in raw:
        return raw["new_decoder_architecture"] == (key == "multi_query")
    if key in MIXTURE and "layers_block_type" in raw:
        return "moe" not in raw["layers_block_type"]
    if key == "mamba_expand":
        return raw.get("mamba_d_ssm") is not None
    if key == "mamba_norm_before_gate":
        return not raw["mamba_rms_norm"]
    if key == "interleave_moe_layer_step":
        return raw["moe_layers"] is not None
    if key in ("n_group", "topk_group"):
        return raw.get("topk_method") == "greedy"
    if key in ("mscale", "mscale_all_dim"):
        inner = raw["rope_parameters"]
        return "attention_factor" in (inner[path[1]] if len(path) > 2 else inner)
    if key == "first_k_dense_replace":
        return raw[key] >= raw["num_hidden_layers"] or "mlp_layer_types" in raw
    if key == "original_max_position_embeddings":
        # Of a scaling; the outer one counts.
        unused = raw["rope_parameters"].get("rope_type") == "default"
        return unused or (len(path) > 1 and "original_max_position_embeddings" in raw)
    return key == "rotary_dim" and "partial_rotary_factor" in raw["rope_parameters"]


def changes(value: Any) -> list[Any]:
    """Other values of the same type."""
    if isinstance(value, bool):
        return [not value]
    if isinstance(value, int | float):
        return [value + 1, value * 2 + 1]
    if value is None:
        return [3, True]
    if isinstance(value, str):
        return ["another"]
    if isinstance(value, list):
        return [value[1:] + value[:1], value[:-1]] if value else [[0], [3]]
    return []


def leaves(raw: dict[str, Any], path: tuple[str, ...] = ()) -> list[tuple[tuple[str, ...], Any]]:
    found = []
    for key, value in raw.items():
        found += leaves(value, (*path, key)) if isinstance(value, dict) else [((*path, key), value)]
    return found


def changed(raw: dict[str, Any], path: tuple[str, ...], value: Any) -> dict[str, Any]:
    key, *rest = path
    return {**raw, key: changed(raw[key], tuple(rest), value) if rest else value}


def read(folder: Path, raw: dict[str, Any]) -> Any:
    (folder / "config.json").write_text(json.dumps(raw))
    return resolve_defaults(config_from(folder))


@pytest.mark.parametrize("name", list(EXAMPLES))
def test_no_key_is_passed_over_in_silence(name: str, tmp_path: Path) -> None:
    raw = json.loads(tiny(name).to_json_string(use_diff=False))
    family, base = EXAMPLES[name][0], read(tmp_path, raw)
    silent = []
    for path, value in leaves(raw):
        key = path[-1]
        if (
            {*path} & (GENERATION | ROUNDING | TRAINING | NAMES | DERIVED)
            or (family, key) in UNUSED
            or is_overruled(raw, path)
        ):
            continue
        if isinstance(value, float) and not math.isfinite(value):
            continue
        told = False
        for other in changes(value):
            try:
                told |= read(tmp_path, changed(raw, path, other)) != base
            except RecipeError:
                told = True
        if not told and changes(value):
            silent.append(".".join(path))
    assert not silent, silent
