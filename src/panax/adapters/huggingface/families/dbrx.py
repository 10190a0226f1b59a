"""DBRX. All experts of a layer are in one tensor.

Sources: the modeling and configuration files of `transformers` 5.23 (dbrx), its conversion of weights, and the released
configuration.
"""

from ..family import Family, MoEMapping
from ..rotary_positions import RotaryMapping
from ..tensor_names import map_weights

_QKV = ("norm_attn_norm.attn.Wqkv.weight", "(heads+kv_heads+kv_heads head_dim) embed")

DBRX = Family(
    model_type="dbrx",
    title="DBRX",
    architecture="DbrxForCausalLM",
    prefix="transformer.",
    fields={
        "norm": "layer_unbiased",
        # The epsilon of PyTorch's LayerNorm, which is built without one.
        "norm_epsilon": 1e-5,
        "tied": False,
    },
    keys={
        "vocab_size": "vocab_size",
        "max_length": "max_seq_len",
        "embed": "d_model",
        "num_layers": "n_layers",
        "heads": "n_heads",
        "kv_heads": "attn_config.kv_n_heads",
        "attention_clip": "attn_config.clip_qkv",
        "ffn": "ffn_config.ffn_hidden_size",
        "activation": "ffn_config.ffn_act_fn.name",
    },
    absent={
        "attn_config.kv_n_heads": 1,
        "attn_config.clip_qkv": None,
        "ffn_config.ffn_hidden_size": 3584,
        "ffn_config.ffn_act_fn.name": "silu",
    },
    only={"tie_word_embeddings": (False,)},
    weights=map_weights(
        "transformer.",
        {"embedding.table": ("wte.weight", "vocab embed"), "final_norm.scale": ("norm_f.weight", "norm")},
        {
            "attention_norm.scale": ("norm_attn_norm.norm_1.weight", "norm"),
            "attention.w_q": (*_QKV, 0),
            "attention.w_k": (*_QKV, 1),
            "attention.w_v": (*_QKV, 2),
            "attention.w_o": ("norm_attn_norm.attn.out_proj.weight", "embed (heads head_dim)"),
            "feed_forward_norm.scale": ("norm_attn_norm.norm_2.weight", "norm"),
            "feed_forward.router.w": ("ffn.router.layer.weight", "router embed"),
            "feed_forward.experts.w_gate": ("ffn.experts.mlp.w1", "(expert expert_ffn) embed"),
            "feed_forward.experts.w_up": ("ffn.experts.mlp.v1", "(expert expert_ffn) embed"),
            "feed_forward.experts.w_down": ("ffn.experts.mlp.w2", "(expert expert_ffn) embed"),
        },
        blocks="blocks",
    ),
    rotary=RotaryMapping(theta_key="attn_config.rope_theta", theta_is=True, scalings=("default",)),
    mixture=MoEMapping(
        always={"ffn": 0},
        keys={
            "experts": "ffn_config.moe_num_experts",
            "active": "ffn_config.moe_top_k",
            "normalize_topk": "ffn_config.moe_normalize_expert_weights",
        },
        absent={
            "ffn_config.moe_num_experts": 4,
            "ffn_config.moe_top_k": 1,
            "ffn_config.moe_normalize_expert_weights": 1.0,
        },
        # The order of the norm by which a token's weights are divided: 1, which is their sum, or None for no
        # division.
        values={"ffn_config.moe_normalize_expert_weights": ((1.0, True), (None, False))},
    ),
    nested=("attn_config", "ffn_config"),
    needed=("attention_clip",),
    whole_heads=True,
)

FAMILIES = (DBRX,)
