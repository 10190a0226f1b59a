"""Published mixtures of experts by name, with their published parameter counts."""

import dataclasses

from ...layers.attention.latent_attention import Latent
from ...layers.attention.rotary import Rotary, YarnScaling
from ...layers.feed_forward import GateClamp
from ...layers.moe.moe_config import MoE
from ..decoder.config import DecoderConfig


def mixtral(*, embed: int, num_layers: int, heads: int, ffn: int, max_length: int) -> DecoderConfig:
    """Return a Mixtral config.

    Source: "Mixtral of Experts" (arXiv:2401.04088), table 1, and the released configurations.
    """
    return DecoderConfig(
        vocab_size=32000,
        max_length=max_length,
        embed=embed,
        num_layers=num_layers,
        heads=heads,
        kv_heads=8,
        head_dim=128,
        ffn=ffn,
        feed_forward=MoE(experts=8, active=2),
        norm_epsilon=1e-5,
        rotary=Rotary(theta=1_000_000.0),
        tied=False,
    )


def dbrx() -> DecoderConfig:
    """Return the config of DBRX.

    Source: the configuration that was released with "Introducing DBRX" (Databricks, 2024).
    """
    return DecoderConfig(
        vocab_size=100352,
        max_length=32768,
        embed=6144,
        num_layers=40,
        heads=48,
        kv_heads=8,
        head_dim=128,
        ffn=10752,
        feed_forward=MoE(experts=16, active=4, balance=0.05),
        norm="layer_unbiased",
        norm_epsilon=1e-5,
        attention_clip=8.0,
        rotary=Rotary(theta=500_000.0),
        tied=False,
    )


def qwen3_moe(*, embed: int, num_layers: int, heads: int, ffn: int, expert_ffn: int) -> DecoderConfig:
    """Return the config of a Qwen3 mixture of experts.

    `ffn` is in the configuration but used by no layer, since all layers are mixtures.

    Source: "Qwen3 Technical Report" (arXiv:2505.09388), table 2, and the released configurations.
    """
    return DecoderConfig(
        vocab_size=151936,
        max_length=40960,
        embed=embed,
        num_layers=num_layers,
        heads=heads,
        kv_heads=4,
        head_dim=128,
        ffn=ffn,
        feed_forward=MoE(experts=128, active=8, ffn=expert_ffn),
        qk_norm=True,
        rotary=Rotary(theta=1_000_000.0),
        tied=False,
    )


def deepseek(
    *, vocab_size: int, max_length: int, heads: int, dense_layers: int, moe: MoE, rotary: Rotary
) -> DecoderConfig:
    """Return the config of DeepSeek-V3 or a model of its architecture, without multi-token prediction layers.

    Source: DeepSeek-V3 (arXiv:2412.19437), section 4.2; Kimi K2 (arXiv:2507.20534), table 2; the released configurations.
    """
    return DecoderConfig(
        vocab_size=vocab_size,
        max_length=max_length,
        embed=7168,
        num_layers=61,
        heads=heads,
        latent=Latent(q_rank=1536, kv_rank=512, nope_dim=128, rope_dim=64, value_dim=128),
        ffn=18432,
        feed_forward=dataclasses.replace(
            moe,
            active=8,
            ffn=2048,
            shared=2048,
            first_dense=dense_layers,
            scores="sigmoid",
            selection_bias=True,
            bias_rate=1e-3,
            balance=1e-4,
            balance_scope="sequence",
        ),
        rotary=rotary,
        tied=False,
    )


def deepseek_rotary(*, theta: float, factor: float, fast: float) -> Rotary:
    scaling = YarnScaling(factor=factor, original_length=4096, fast=fast, mscale=1.0, mscale_all_dim=1.0)
    return Rotary(theta=theta, scaling=scaling, interleaved=True)


def gpt_oss(*, num_layers: int, experts: int) -> DecoderConfig:
    """Return the config of a gpt-oss.

    Source: "gpt-oss-120b & gpt-oss-20b Model Card" (arXiv:2508.10925), table 1, and the released configurations.
    """
    return DecoderConfig(
        vocab_size=201088,
        max_length=131072,
        embed=2880,
        num_layers=num_layers,
        heads=64,
        kv_heads=8,
        head_dim=64,
        ffn=2880,
        feed_forward=MoE(experts=experts, active=4, logit_bias=True, expert_biases=True, balance=1e-3),
        gate_clamp=GateClamp(),
        norm_epsilon=1e-5,
        attention_sinks=True,
        attention_bias=True,
        attention_output_bias=True,
        windows=(128, 0),
        rotary=Rotary(
            theta=150_000.0, scaling=YarnScaling(factor=32.0, original_length=4096, fast=32.0, truncate=False)
        ),
        tied=False,
    )


def glam() -> DecoderConfig:
    """Return the config of GLaM 64B/64E, which was never released: dense layers are gated, experts are not.

    Source: GLaM (arXiv:2112.06905), table 4 and section 3. Differs: positions are rotary instead of a learned
    relative-position bias in each layer; norms, which the paper does not specify, are RMS.
    """
    return DecoderConfig(
        vocab_size=256000,
        max_length=1024,
        embed=8192,
        num_layers=64,
        heads=128,
        head_dim=128,
        ffn=32768,
        feed_forward=MoE(experts=64, active=2, every=2, gated=False, balance=0.01),
        activation="gelu",
        tied=True,
    )


MOE_PRESETS: dict[str, DecoderConfig] = {
    "mixtral_8x7b": mixtral(embed=4096, num_layers=32, heads=32, ffn=14336, max_length=32768),
    "mixtral_8x22b": mixtral(embed=6144, num_layers=56, heads=48, ffn=16384, max_length=65536),
    "dbrx": dbrx(),
    "qwen3_30b_a3b": qwen3_moe(embed=2048, num_layers=48, heads=32, ffn=6144, expert_ffn=768),
    "qwen3_235b_a22b": qwen3_moe(embed=4096, num_layers=94, heads=64, ffn=12288, expert_ffn=1536),
    "deepseek_v3": deepseek(
        vocab_size=129280,
        max_length=163840,
        heads=128,
        dense_layers=3,
        moe=MoE(experts=256, groups=8, active_groups=4, scale=2.5),
        rotary=deepseek_rotary(theta=10_000.0, factor=40.0, fast=32.0),
    ),
    "kimi_k2": deepseek(
        vocab_size=163840,
        max_length=131072,
        heads=64,
        dense_layers=1,
        moe=MoE(experts=384, scale=2.827),
        rotary=deepseek_rotary(theta=50_000.0, factor=32.0, fast=1.0),
    ),
    "gpt_oss_20b": gpt_oss(num_layers=24, experts=32),
    "gpt_oss_120b": gpt_oss(num_layers=36, experts=128),
    "glam_64b_64e": glam(),
}

MOE_PUBLISHED_PARAMETERS: dict[str, int] = {
    "mixtral_8x7b": 46_702_792_704,
    "mixtral_8x22b": 140_620_634_112,
    "dbrx": 131_596_523_520,
    "qwen3_30b_a3b": 30_532_122_624,
    "qwen3_235b_a22b": 235_093_634_560,
    "deepseek_v3": 671_026_419_200,
    # From the weight files; the paper's "1.04 trillion" is more than the released shapes add up to.
    "kimi_k2": 1_026_408_232_448,
    "gpt_oss_20b": 20_914_757_184,
    "gpt_oss_120b": 116_829_156_672,
    # From the shapes in the paper (its "1.162 trillion"), with RMS norms.
    "glam_64b_64e": 1_161_756_155_904,
}
"""Counts as in `PUBLISHED_PARAMETERS`, with selection biases and without DeepSeek-V3's multi-token prediction
layer.
"""

PUBLISHED_ACTIVE: dict[str, str] = {
    "mixtral_8x7b": "12.9",
    "mixtral_8x22b": "39",
    "dbrx": "36",
    "qwen3_30b_a3b": "3.3",
    "qwen3_235b_a22b": "22",
    "deepseek_v3": "37",
    "kimi_k2": "32.6",
    "gpt_oss_20b": "3.61",
    "gpt_oss_120b": "5.13",
    "glam_64b_64e": "96.6",
}
"""Active parameters per token, in billions, as rounded in the papers; some include the embedding, some
don't.
"""
