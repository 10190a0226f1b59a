"""Decoders with gated delta nets and attention in some layers (Qwen3-Next, Qwen3.5): config and layers."""

import dataclasses
from typing import ClassVar

import jax

from ...core import register_serializable
from ...layers.mixers.delta_net import DeltaNet
from ...layers.mixers.state_space_block import StateSpaceBlock
from .blocks import build_feed_forward, norm_builder
from .config import LayerKind, require
from .recurrent import RecurrentConfig

DELTA_NET = "delta_net"
"""The `LayerKind.mixer` of delta-net layers."""


@register_serializable
@dataclasses.dataclass(frozen=True, kw_only=True)
class DeltaNetConfig(RecurrentConfig):
    """A decoder of gated delta nets, with attention in some layers or none; each layer has a feed-forward.

    Attributes:
        attention_layers: Indices of the attention layers, ascending; the others have a delta net.
        delta_heads: Number of value heads of a delta net.
        delta_value_dim: Width of a value; `delta_heads * delta_value_dim` is the net's inner width.
        delta_key_heads: Number of heads of queries and keys, each shared by adjacent value heads.
        delta_key_dim: Width of a query and of a key.
        conv_taps: Kernel width of the convolutions of queries, keys and values.
        rotary: None for attention without positions.
    """

    mixer: ClassVar[str] = DELTA_NET

    delta_heads: int = 8
    delta_value_dim: int = 64
    delta_key_heads: int = 4
    delta_key_dim: int = 64
    conv_taps: int = 4

    def __post_init__(self) -> None:
        sizes = ("delta_heads", "delta_value_dim", "delta_key_heads", "delta_key_dim", "conv_taps", "ffn")
        self.require_positive(*sizes)
        require(
            self.delta_heads % self.delta_key_heads == 0,
            f"model.delta_heads={self.delta_heads} is not divisible by delta_key_heads={self.delta_key_heads}; each key head "
            f"serves an equal number of value heads",
        )
        super().__post_init__()

    def recurrent_block(self, key: jax.Array, kind: LayerKind) -> StateSpaceBlock:
        return build_delta_net_block(key, self, kind)


def build_delta_net_block(key: jax.Array, config: DeltaNetConfig, kind: LayerKind) -> StateSpaceBlock:
    """Initialize one delta-net layer."""
    mixer_key, feed_key, norm_key = jax.random.split(key, 3)
    norm = norm_builder(config)
    mixer = DeltaNet.build(
        mixer_key,
        config.embed,
        key_heads=config.delta_key_heads,
        heads=config.delta_heads,
        key_dim=config.delta_key_dim,
        value_dim=config.delta_value_dim,
        taps=config.conv_taps,
        epsilon=config.norm_epsilon,
        output_gain=config.output_gain,
    )
    return StateSpaceBlock(
        mixer_norm=norm(norm_key, config.embed),
        mixer=mixer,
        feed_forward_norm=norm(norm_key, config.embed),
        feed_forward=build_feed_forward(feed_key, config, kind, config.output_gain),
        dropout=config.dropout,
    )
