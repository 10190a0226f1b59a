"""Llama, and families that differ from it in a line or two: the names of biases, the layout of rotated pairs, windows, or an
activation without a gate.

Sources: the modeling and configuration files of `transformers` 5.23 (llama, cwm, seed_oss, helium, arcee, internlm3,
iquestcoder), and the released configurations.
"""

from ..family import Family
from ..rotary_positions import RotaryMapping
from ..sliding_windows import WindowMapping
from ..tensor_names import GATED, MULTI_HEAD, PRE_NORMS, ROTARY_ABSENT, ROTARY_KEYS, rotary_weights, without

LLAMA = Family(
    model_type="llama",
    title="Llama",
    architecture="LlamaForCausalLM",
    keys=ROTARY_KEYS,
    absent=ROTARY_ABSENT,
    only={"mlp_bias": (False,)},
    rotary=RotaryMapping(),
    weights=rotary_weights(PRE_NORMS),
    whole_heads=True,
)

CWM = Family(
    model_type="cwm",
    title="Code World Model",
    architecture="CwmForCausalLM",
    keys=without(ROTARY_KEYS, "attention_bias", "attention_output_bias"),
    absent={**ROTARY_ABSENT, "rms_norm_eps": 1e-5, "head_dim": 128},
    only={"mlp_bias": (False,)},
    rotary=RotaryMapping(theta=1_000_000.0, scalings=("default", "llama3", "linear", "dynamic", "yarn")),
    token_ids={"bos_token_id": 128000},
    preferred=False,
    windows=WindowMapping(absent=8192, needs=8192, sliding=lambda layer, raw: layer % 4 != 0),
    weights=rotary_weights(PRE_NORMS),
    whole_heads=True,
)

SEED_OSS = Family(
    model_type="seed_oss",
    title="Seed-OSS",
    architecture="SeedOssForCausalLM",
    keys=without(ROTARY_KEYS, attention_output_bias="attention_out_bias"),
    absent={**ROTARY_ABSENT, "head_dim": 128, "attention_bias": True, "attention_out_bias": False},
    preferred=False,
    only={"mlp_bias": (False,)},
    rotary=RotaryMapping(),
    weights=rotary_weights(PRE_NORMS),
)

HELIUM = Family(
    model_type="helium",
    title="Helium",
    architecture="HeliumForCausalLM",
    keys=without(ROTARY_KEYS, "attention_bias", "attention_output_bias"),
    absent={**ROTARY_ABSENT, "head_dim": 128, "rms_norm_eps": 1e-8},
    only={"mlp_bias": (False,), "attention_bias": (False,)},
    rotary=RotaryMapping(theta=100_000.0, interleaved=True),
    preferred=False,
    weights=rotary_weights(PRE_NORMS),
)

ARCEE = Family(
    model_type="arcee",
    title="Arcee AFM",
    architecture="ArceeForCausalLM",
    fields={"gated": False},
    keys={**ROTARY_KEYS, "feed_forward_bias": "mlp_bias"},
    absent={**ROTARY_ABSENT, "hidden_act": "relu2", "rms_norm_eps": 1e-5, "mlp_bias": False},
    rotary=RotaryMapping(),
    weights=rotary_weights(
        PRE_NORMS,
        {
            **MULTI_HEAD,
            **GATED,
            "feed_forward.b_up": ("mlp.up_proj.bias", "ffn"),
            "feed_forward.b_down": ("mlp.down_proj.bias", "norm"),
        },
    ),
    whole_heads=True,
)

INTERNLM3 = Family(
    model_type="internlm3",
    title="InternLM3",
    architecture="InternLM3ForCausalLM",
    keys=without(ROTARY_KEYS, "attention_bias", "attention_output_bias"),
    absent={**ROTARY_ABSENT, "num_key_value_heads": 2, "head_dim": 128, "rms_norm_eps": 1e-5},
    # One bias setting is of the queries, keys and values, and one of all that is not; `transformers` takes them equal.
    only={"attention_bias": (False,), "mlp_bias": (False,), "qkv_bias": (False,), "bias": (False,)},
    rotary=RotaryMapping(),
    preferred=False,
    weights=rotary_weights(PRE_NORMS),
    whole_heads=True,
)

IQUESTCODER = Family(
    model_type="iquestcoder",
    title="IQuest-Coder",
    architecture="IQuestCoderForCausalLM",
    keys=ROTARY_KEYS,
    absent={**ROTARY_ABSENT, "num_key_value_heads": 8, "head_dim": 128, "rms_norm_eps": 1e-5},
    only={"mlp_bias": (False,), "clip_qkv": (None,), "use_sliding_window": (False,)},
    rotary=RotaryMapping(),
    preferred=False,
    weights=rotary_weights(PRE_NORMS),
    whole_heads=True,
)

FAMILIES = (LLAMA, CWM, SEED_OSS, HELIUM, ARCEE, INTERNLM3, IQUESTCODER)
