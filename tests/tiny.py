"""A decoder small enough to compile in seconds, with every part that can go wrong across layouts."""

import numpy as np

from panax.layers import GateClamp, LinearScaling, Rotary, YarnScaling
from panax.layers.moe.moe_config import MoE
from panax.models import (
    ConvolutionConfig,
    DecoderConfig,
    DecoderTask,
    DeltaNetConfig,
    HeadSizes,
    SideBySideConfig,
    SublayerConfig,
)
from panax.optim import AdamW, Schedule

CONFIG = DecoderConfig(
    vocab_size=96,
    max_length=32,
    embed=32,
    num_layers=3,
    heads=4,
    kv_heads=2,
    ffn=64,
    windows=(8, 0),
    qk_norm=True,
    post_norms=True,
    attention_bias=True,
    logit_soft_cap=30.0,
    dropout=0.1,
)
ROWS, LENGTH = 16, 32
AXES = dict.fromkeys(("tokens", "targets", "loss_mask", "segment", "position"), ("batch", "seq"))
ADAMW = AdamW(schedule=Schedule(peak=1e-2, decay="constant"))


def task(**changes) -> DecoderTask:
    return DecoderTask(model=CONFIG, **changes)


def batch(seed: int = 0, rows: int = ROWS, length: int = LENGTH) -> dict[str, np.ndarray]:
    """Random tokens in two packed documents a row, some padding, a random loss mask."""
    rng = np.random.default_rng(seed)
    cut = rng.integers(4, length - 4, rows)
    at = np.arange(length)[None]
    segment = np.where(at < cut[:, None], 1, 2)
    segment = np.where(at >= length - 3, 0, segment)
    return {
        "tokens": rng.integers(0, CONFIG.vocab_size, (rows, length)).astype(np.int32),
        "targets": rng.integers(0, CONFIG.vocab_size, (rows, length)).astype(np.int32),
        "loss_mask": ((rng.random((rows, length)) < 0.8) & (segment > 0)).astype(np.float32),
        "segment": segment.astype(np.int32),
        "position": np.where(at < cut[:, None], at, at - cut[:, None]).astype(np.int32),
    }


SIZES = {
    "vocab_size": 96,
    "max_length": 32,
    "embed": 32,
    "num_layers": 4,
    "heads": 4,
    "kv_heads": 2,
    "ffn": 48,
}

# With a small epsilon, norms of what a net has hardly written yet enlarge rounding errors.
DELTA = {"norm_epsilon": 0.05, "delta_heads": 8, "delta_value_dim": 8, "delta_key_heads": 2, "delta_key_dim": 6}

CONVOLUTIONS = "short convolutions and experts, attention in every second layer"
CHUNKS = "chunks of attention, growing queries, experts that weigh their inputs"
SUBLAYERS = "layers of one sub-layer, with experts"
SIDE_BY_SIDE = "attention and state spaces side by side"
ALIBI = "linear biases of scores, normalized embeddings"
LEARNED = "learned positions after unused rows"

FEATURES: dict[str, DecoderConfig] = {
    "norms after, over all heads, positions by window": DecoderConfig(
        **SIZES,
        pre_norms=False,
        post_norms=True,
        qk_norm=True,
        qk_norm_scope="all_heads",
        windows=(8, 0),
        rotaries=(Rotary(), Rotary(scaling=YarnScaling(factor=4.0, original_length=8, fast=4.0, attention_factor=1.3))),
    ),
    "parallel branches, one norm, layers without positions": DecoderConfig(
        **SIZES,
        norm="layer_unbiased",
        parallel_residual=True,
        shared_norm=True,
        qk_norm=True,
        qk_norm_scope="own_head",
        windows=(8, 0),
        rotaries=(Rotary(interleaved=True), None),
        logit_multiplier=0.3,
    ),
    "parallel branches, two norms, no gate, a part rotated": DecoderConfig(
        **SIZES,
        norm="layer",
        norm_unit_offset=True,
        parallel_residual=True,
        gated=False,
        activation="relu_squared",
        attention_bias=True,
        feed_forward_bias=True,
        rotary=Rotary(fraction=0.5, scaling=LinearScaling(factor=4.0)),
        tied=False,
    ),
    "multipliers, norms without scales, growing queries": DecoderConfig(
        **SIZES,
        norm="layer_unscaled",
        embed_multiplier=3.0,
        residual_multiplier=0.6,
        logit_multiplier=0.2,
        rotary=Rotary(query_growth=0.4, query_length=6),
        dropout=0.1,
    ),
    "experts, a gated shared one, norms after the rotation": DecoderConfig(
        **SIZES,
        qk_norm=True,
        qk_norm_after_rotary=True,
        residual_multiplier=0.8,
        feed_forward=MoE(experts=4, active=2, ffn=16, shared=16, shared_gate=True, balance=0.1, first_dense=1),
    ),
    "sinks in windows, clamped gates, biases of experts and router": DecoderConfig(
        **SIZES,
        attention_sinks=True,
        attention_bias=True,
        attention_output_bias=True,
        windows=(8, 0),
        gate_clamp=GateClamp(limit=0.5),
        feed_forward=MoE(experts=4, active=2, ffn=16, logit_bias=True, expert_biases=True, balance=0.1, first_dense=1),
        tied=False,
    ),
    "heads of two widths and numbers": DecoderConfig(
        **SIZES,
        windows=(8, 0),
        head_sizes=(HeadSizes(kv_heads=4), HeadSizes(heads=8, kv_heads=4, head_dim=12)),
        rotaries=(Rotary(), Rotary(fraction=0.5)),
        qk_norm=True,
        attention_bias=True,
    ),
    "delta nets, gated attention in every fourth layer": DeltaNetConfig(
        **SIZES,
        **DELTA,
        attention_layers=(3,),
        head_dim=16,
        qk_norm=True,
        norm_unit_offset=True,
        attention_gate=True,
        rotary=Rotary(fraction=0.25),
        dropout=0.1,
    ),
    "delta nets and experts, a gated shared one": DeltaNetConfig(
        **SIZES,
        **DELTA,
        attention_layers=(1, 3),
        attention_gate=True,
        feed_forward=MoE(experts=4, active=2, ffn=16, shared=16, shared_gate=True, balance=0.1),
    ),
    CONVOLUTIONS: ConvolutionConfig(
        **SIZES,
        attention_layers=(1, 3),
        conv_taps=4,
        qk_norm=True,
        feed_forward=MoE(
            experts=4, active=2, ffn=16, scores="sigmoid", selection_bias=True, first_dense=1, balance=0.1
        ),
    ),
    CHUNKS: DecoderConfig(
        **SIZES,
        qk_norm=True,
        qk_norm_scope="unscaled",
        qk_norm_layers="rotary",
        qk_norm_after_rotary=True,
        windows=(6, 0),
        window_kind="chunked",
        rotaries=(Rotary(interleaved=True), Rotary(fraction=0.0, query_growth=0.4, query_length=6, query_first=1)),
        feed_forward=MoE(
            experts=4,
            active=2,
            ffn=16,
            shared=16,
            scores="sigmoid",
            normalize_topk=False,
            weigh="input",
            balance=0.1,
            every=2,
        ),
    ),
    SUBLAYERS: SublayerConfig(
        **SIZES,
        sublayers=("state_space", "mixture", "attention", "feed_forward"),
        ssm_heads=4,
        ssm_head_dim=8,
        ssm_groups=2,
        ssm_state=8,
        ssm_step_floor=0.01,
        gated=False,
        activation="relu_squared",
        rotary=None,
        feed_forward=MoE(experts=4, active=2, ffn=16, shared=16, scores="sigmoid", selection_bias=True, balance=0.1),
    ),
    SIDE_BY_SIDE: SideBySideConfig(
        **SIZES,
        ssm_heads=4,
        ssm_head_dim=8,
        ssm_groups=2,
        ssm_state=8,
        ssm_norm=False,
        key_multiplier=0.7,
        attention_in_multiplier=1.3,
        ssm_out_multiplier=0.6,
        ssm_multipliers=(0.9, 1.2, 0.7, 1.1, 0.8),
        gate_multiplier=1.4,
    ),
    ALIBI: DecoderConfig(
        **SIZES,
        norm="layer",
        gated=False,
        activation="gelu_tanh",
        rotary=None,
        alibi_slopes=(0.7, 0.3, 0.1, 0.05),
        embed_norm=True,
        windows=(8, 0),
    ),
    LEARNED: DecoderConfig(**SIZES, norm="layer", gated=False, activation="relu", rotary=None, position_offset=2),
}
"""Small decoders in which the features of open models meet as they do in families."""
