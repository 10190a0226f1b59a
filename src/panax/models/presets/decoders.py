"""Published decoders by name, with their published parameter counts."""

import dataclasses

from ...layers.attention.rotary import Rotary, RotaryScaling
from ..decoder.config import DecoderConfig
from ..decoder.mamba import MAMBA_PRESETS, MAMBA_PUBLISHED_PARAMETERS
from .moe import MOE_PRESETS, MOE_PUBLISHED_PARAMETERS


def gpt2(*, embed: int, num_layers: int, heads: int) -> DecoderConfig:
    """Return a GPT-2 config.

    Source: "Language Models are Unsupervised Multitask Learners" (Radford et al., 2019), released
        configurations.
    """
    return DecoderConfig(
        vocab_size=50257,
        max_length=1024,
        embed=embed,
        num_layers=num_layers,
        heads=heads,
        ffn=4 * embed,
        gated=False,
        activation="gelu_tanh",
        norm="layer",
        norm_epsilon=1e-5,
        attention_bias=True,
        attention_output_bias=True,
        feed_forward_bias=True,
        rotary=None,
        tied=True,
    )


def megatron(*, embed: int, num_layers: int, heads: int) -> DecoderConfig:
    """Return the config of a decoder that was trained or benchmarked but never released.

    It is GPT-2 with a vocabulary padded to 51,200 and rows of 2,048 tokens.

    Source: Megatron-LM (arXiv:2104.04473), table 1, and for 530 billion parameters MT-NLG (arXiv:2201.11990), section 2.
    """
    like = gpt2(embed=embed, num_layers=num_layers, heads=heads)
    return dataclasses.replace(like, vocab_size=51200, max_length=2048)


def llama3(
    *,
    embed: int,
    num_layers: int,
    heads: int,
    ffn: int,
    head_dim: int = 128,
    tied: bool = False,
    scaling: RotaryScaling | None = None,
    max_length: int = 8192,
) -> DecoderConfig:
    """Return a Llama 3 config.

    Source: "The Llama 3 Herd of Models" (arXiv:2407.21783), table 3, and the released configurations.
    """
    return DecoderConfig(
        vocab_size=128256,
        max_length=max_length,
        embed=embed,
        num_layers=num_layers,
        heads=heads,
        kv_heads=8,
        head_dim=head_dim,
        ffn=ffn,
        norm_epsilon=1e-5,
        rotary=Rotary(theta=500_000.0, scaling=scaling),
        tied=tied,
    )


def qwen3(*, embed: int, num_layers: int, heads: int, ffn: int, tied: bool) -> DecoderConfig:
    """Return the config of a dense Qwen3 model.

    Source: "Qwen3 Technical Report" (arXiv:2505.09388), table 1, and the released configurations.
    """
    return DecoderConfig(
        vocab_size=151936,
        max_length=40960,
        embed=embed,
        num_layers=num_layers,
        heads=heads,
        kv_heads=8,
        head_dim=128,
        ffn=ffn,
        qk_norm=True,
        rotary=Rotary(theta=1_000_000.0),
        tied=tied,
    )


def gemma2(
    *, embed: int, num_layers: int, heads: int, kv_heads: int, head_dim: int, ffn: int, query_scale: float
) -> DecoderConfig:
    """Return a Gemma 2 config.

    Source: "Gemma 2" (arXiv:2408.00118), table 1, and the released configurations.
    """
    return DecoderConfig(
        vocab_size=256000,
        max_length=8192,
        embed=embed,
        num_layers=num_layers,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        ffn=ffn,
        activation="gelu_tanh",
        norm_unit_offset=True,
        post_norms=True,
        windows=(4096, 0),
        attention_soft_cap=50.0,
        logit_soft_cap=30.0,
        query_scale=query_scale,
        embed_scale=True,
        tied=True,
    )


LLAMA_3_1 = RotaryScaling()
LLAMA_3_2 = RotaryScaling(factor=32.0)

PRESETS: dict[str, DecoderConfig] = {
    "gpt2": gpt2(embed=768, num_layers=12, heads=12),
    "gpt2_medium": gpt2(embed=1024, num_layers=24, heads=16),
    "gpt2_large": gpt2(embed=1280, num_layers=36, heads=20),
    "gpt2_xl": gpt2(embed=1600, num_layers=48, heads=25),
    "llama3_8b": llama3(embed=4096, num_layers=32, heads=32, ffn=14336),
    "llama3_70b": llama3(embed=8192, num_layers=80, heads=64, ffn=28672),
    "llama3_405b": llama3(embed=16384, num_layers=126, heads=128, ffn=53248, scaling=LLAMA_3_1, max_length=131072),
    "llama3_1b": llama3(
        embed=2048, num_layers=16, heads=32, head_dim=64, ffn=8192, tied=True, scaling=LLAMA_3_2, max_length=131072
    ),
    "llama3_3b": llama3(embed=3072, num_layers=28, heads=24, ffn=8192, tied=True, scaling=LLAMA_3_2, max_length=131072),
    "qwen3_0.6b": qwen3(embed=1024, num_layers=28, heads=16, ffn=3072, tied=True),
    "qwen3_1.7b": qwen3(embed=2048, num_layers=28, heads=16, ffn=6144, tied=True),
    "qwen3_4b": qwen3(embed=2560, num_layers=36, heads=32, ffn=9728, tied=True),
    "qwen3_8b": qwen3(embed=4096, num_layers=36, heads=32, ffn=12288, tied=False),
    "qwen3_14b": qwen3(embed=5120, num_layers=40, heads=40, ffn=17408, tied=False),
    "qwen3_32b": qwen3(embed=5120, num_layers=64, heads=64, ffn=25600, tied=False),
    "gemma2_2b": gemma2(embed=2304, num_layers=26, heads=8, kv_heads=4, head_dim=256, ffn=9216, query_scale=256.0),
    "gemma2_9b": gemma2(embed=3584, num_layers=42, heads=16, kv_heads=8, head_dim=256, ffn=14336, query_scale=256.0),
    "gemma2_27b": gemma2(embed=4608, num_layers=46, heads=32, kv_heads=16, head_dim=128, ffn=36864, query_scale=144.0),
    "mt_nlg_530b": megatron(embed=20480, num_layers=105, heads=128),
    "megatron_1t": megatron(embed=25600, num_layers=128, heads=160),
    **MOE_PRESETS,
    **MAMBA_PRESETS,
}
"""Configs of published decoders by name, for `preset:NAME`."""

UNRELEASED_PRESETS = frozenset({"glam_64b_64e", "megatron_1t", "mt_nlg_530b"})
"""Presets of models that papers describe and that were never released."""

PUBLISHED_PARAMETERS: dict[str, int] = {
    "gpt2": 124_439_808,
    "gpt2_medium": 354_823_168,
    "gpt2_large": 774_030_080,
    "gpt2_xl": 1_557_611_200,
    "llama3_8b": 8_030_261_248,
    "llama3_70b": 70_553_706_496,
    "llama3_405b": 405_853_388_800,
    "llama3_1b": 1_235_814_400,
    "llama3_3b": 3_212_749_824,
    "qwen3_0.6b": 596_049_920,
    "qwen3_1.7b": 1_720_574_976,
    "qwen3_4b": 4_022_468_096,
    "qwen3_8b": 8_190_735_360,
    "qwen3_14b": 14_768_307_200,
    "qwen3_32b": 32_762_123_264,
    "gemma2_2b": 2_614_341_888,
    "gemma2_9b": 9_241_705_984,
    "gemma2_27b": 27_227_128_320,
    # From the paper's equation 2 (its "529.6 billion" and "1008.0 billion") plus the last norm, which the
    # equation omits.
    "mt_nlg_530b": 529_600_819_200,
    "megatron_1t": 1_008_038_758_400,
    **MOE_PUBLISHED_PARAMETERS,
    **MAMBA_PUBLISHED_PARAMETERS,
}
"""Counts from the released weight files (tied weights counted once), or from the paper if nothing was
released.
"""
