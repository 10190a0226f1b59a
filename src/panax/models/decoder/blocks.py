"""Builders of the decoder's layers, from its config."""

import functools
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import jax

from ...core import constant, normal
from ...layers import Attention, FeedForward, LatentAttention, MixtureOfExperts, Norm, TransformerBlock
from ...layers.attention.attention import Chunks, HeadNorm

if TYPE_CHECKING:
    from .config import DecoderConfig, LayerKind


def build_transformer_block(key: jax.Array, config: "DecoderConfig", kind: "LayerKind") -> TransformerBlock:
    """Initialize one layer of the given kind."""
    keys = iter(jax.random.split(key, 8))
    # Each layer adds two branches; their sum keeps its scale at any depth (GPT-2, section 2.3).
    output_gain = (2 * config.num_layers) ** -0.5
    norm = norm_builder(config)
    attention = build_attention(keys, config, kind, output_gain)
    feed_forward = build_feed_forward(next(keys), config, kind, output_gain)
    return TransformerBlock(
        attention_norm=norm(next(keys), config.embed) if config.pre_norms else None,
        attention=attention,
        attention_post_norm=norm(next(keys), config.embed) if config.post_norms else None,
        feed_forward_norm=norm(next(keys), config.embed) if config.pre_norms and not config.shared_norm else None,
        feed_forward=feed_forward,
        feed_forward_post_norm=norm(next(keys), config.embed) if config.post_norms else None,
        parallel=config.parallel_residual,
        multiplier=config.residual_multiplier,
        dropout=config.dropout,
    )


def norm_builder(config: "DecoderConfig") -> Callable[..., Norm]:
    """Return a function that builds the decoder's kind of norm from a key and a size."""
    return functools.partial(
        Norm.build, kind=config.norm, epsilon=config.norm_epsilon, unit_offset=config.norm_unit_offset
    )


def build_feed_forward(
    key: jax.Array, config: "DecoderConfig", kind: "LayerKind", output_gain: float
) -> FeedForward | MixtureOfExperts:
    """Initialize the feed-forward of a layer: dense, or a mixture of experts if its kind has one."""
    widths = config.embed, config.ffn
    options = {"activation": config.activation, "clamp": config.gate_clamp, "output_gain": output_gain}
    if kind.mixture and config.feed_forward is not None:
        return MixtureOfExperts.build(key, *widths, config.feed_forward, gated=config.gated, **options)
    return FeedForward.build(key, *widths, gated=config.gated, bias=config.feed_forward_bias, **options)


def build_attention(
    keys: Iterator[jax.Array], config: "DecoderConfig", kind: "LayerKind", output_gain: float
) -> Attention | LatentAttention:
    """Initialize the attention of a layer."""
    scale = config.query_scale**-0.5 if config.query_scale else None
    rotary, window = kind.rotary, kind.window or None
    if config.latent is not None and rotary is not None:
        return LatentAttention.build(
            next(keys),
            config.embed,
            config.heads,
            config.latent,
            rotary=rotary,
            window=window,
            soft_cap=config.attention_soft_cap,
            scale=scale,
            output_gain=output_gain,
        )
    head = kind.heads or config.layer_heads[0]
    norm = functools.partial(norm_builder(config), size=head.head_dim)
    sizes = {
        "embed": config.embed,
        "norm": config.embed,
        "heads": head.heads,
        "kv_heads": head.kv_heads,
        "head_dim": head.head_dim,
    }
    absent = {} if config.attention_bias else {"b_q": None, "b_k": None, "b_v": None}
    absent |= {} if config.attention_output_bias else {"b_o": None}
    sinks = {"sinks": constant(0.0)} if config.attention_sinks else {}
    if rotary is not None and rotary.score_gain != 1.0:
        scale = (head.head_dim**-0.5 if scale is None else scale) * rotary.score_gain
    gate = {"w_gate": normal("embed")} if config.attention_gate else {}
    scoped, scales = None, {}
    rotates = rotary is not None and rotary.fraction > 0.0
    normed = config.qk_norm and (rotates or config.qk_norm_layers == "all")
    if normed and config.qk_norm_scope != "head":
        scoped = HeadNorm(
            "rms" if config.norm.startswith("rms") else "layer", config.norm_epsilon, config.qk_norm_scope
        )
        if config.qk_norm_scope != "unscaled":
            scales = {"q_scale": constant(1.0), "k_scale": constant(1.0)}
    per_head = normed and scoped is None
    chunks = None
    if window is not None and config.window_kind == "chunked":
        window, chunks = None, Chunks(window, -(-config.max_length // window))
    return Attention.create(
        next(keys),
        sizes,
        w_o=normal("heads", "head_dim", gain=output_gain),
        q_norm=norm(next(keys)) if per_head else None,
        k_norm=norm(next(keys)) if per_head else None,
        head_norm=scoped,
        norm_after_rotary=config.qk_norm_after_rotary,
        chunks=chunks,
        alibi=config.alibi_slopes,
        rotary=rotary,
        window=window,
        clip=config.attention_clip,
        soft_cap=config.attention_soft_cap,
        scale=scale,
        **absent,
        **gate,
        **scales,
        **sinks,
    )
