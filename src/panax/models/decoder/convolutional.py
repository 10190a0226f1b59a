"""Decoders with short convolutions and attention in some layers (LFM2): config and layers."""

import dataclasses
from typing import ClassVar

import jax

from ...core import register_serializable
from ...layers.mixers.short_convolution import ShortConvolution
from ...layers.mixers.state_space_block import StateSpaceBlock
from .blocks import build_feed_forward, norm_builder
from .config import LayerKind
from .recurrent import RecurrentConfig

SHORT_CONVOLUTION = "short_convolution"
"""The `LayerKind.mixer` of layers with a short convolution."""


@register_serializable
@dataclasses.dataclass(frozen=True, kw_only=True)
class ConvolutionConfig(RecurrentConfig):
    """A decoder of short convolutions, with attention in some layers, none or all; each layer has a feed-forward.

    Attributes:
        attention_layers: Indices of the attention layers, ascending; the others have a convolution of `embed` channels.
        conv_taps: Kernel width of the convolutions.
        rotary: None for attention without positions.
    """

    mixer: ClassVar[str] = SHORT_CONVOLUTION
    attention_only: ClassVar[bool] = True

    conv_taps: int = 3

    def __post_init__(self) -> None:
        self.require_positive("conv_taps", "ffn")
        super().__post_init__()

    def recurrent_block(self, key: jax.Array, kind: LayerKind) -> StateSpaceBlock:
        return build_convolution_block(key, self, kind)


def build_convolution_block(key: jax.Array, config: ConvolutionConfig, kind: LayerKind) -> StateSpaceBlock:
    """Initialize one layer with a short convolution."""
    mixer_key, feed_key, norm_key = jax.random.split(key, 3)
    norm = norm_builder(config)
    return StateSpaceBlock(
        mixer_norm=norm(norm_key, config.embed),
        mixer=ShortConvolution.build(
            mixer_key, config.embed, channels=config.embed, taps=config.conv_taps, output_gain=config.output_gain
        ),
        feed_forward_norm=norm(norm_key, config.embed),
        feed_forward=build_feed_forward(feed_key, config, kind, config.output_gain),
        dropout=config.dropout,
    )
