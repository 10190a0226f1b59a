"""Decoders with layers of one sub-layer each (Nemotron-H): config and layers."""

import dataclasses
from typing import Literal

import jax

from ...core import register_serializable
from ...layers.attention.attention import Attention
from ...layers.block import Block
from ...layers.sublayer_block import SublayerBlock
from .blocks import build_attention, build_feed_forward, norm_builder
from .config import DecoderConfig, LayerKind, require
from .mamba import STATE_SPACE, HybridConfig, build_state_space_block
from .recurrent import FEED_FORWARD_SETTINGS, RecurrentConfig

Sublayer = Literal["state_space", "attention", "feed_forward", "mixture"]

FEED_FORWARD = "feed_forward"
"""The `LayerKind.mixer` of layers that are a feed-forward alone."""


@register_serializable
@dataclasses.dataclass(frozen=True, kw_only=True)
class SublayerConfig(HybridConfig):
    """A decoder of which each layer is one sub-layer: a state-space mixer, attention, a feed-forward or a mixture of experts.

    Attributes:
        sublayers: The sub-layer of each layer.
        attention_layers: Unused; `sublayers` names the attention layers.
        ffn: Width of a feed-forward layer; 0 without any.
        feed_forward: The mixture of experts of the layers that are one; its `every` and `first_dense` are unused.
        rotary: None for attention without positions.
    """

    sublayers: tuple[Sublayer, ...] = ("state_space",) * 4

    def __post_init__(self) -> None:
        require(
            len(self.sublayers) == self.num_layers,
            f"model.sublayers names {len(self.sublayers)} layers; expected num_layers={self.num_layers}",
        )
        require(
            not self.attention_layers,
            f"model.attention_layers={self.attention_layers}; sublayers names the layers, leave attention_layers ()",
        )
        require(self.ffn >= 0, f"model.ffn={self.ffn}; expected 0 or more")
        require(self.latent is None, "model.latent with sublayers; their attention has none, leave it None")
        require(self.ffn >= 0, f"model.ffn={self.ffn}; expected a width, or 0 without a feed-forward")
        moe = self.feed_forward
        require(
            (moe is not None) == ("mixture" in self.sublayers),
            f"model.feed_forward={moe!r}; expected a mixture if, and only if, sublayers has one",
        )
        require(
            moe is None or (moe.every == 1 and not moe.first_dense),
            "model.feed_forward.every and first_dense have no effect with sublayers; leave them 1 and 0",
        )
        super().__post_init__()

    def check_feed_forward(self) -> None:
        if "feed_forward" in self.sublayers or ("mixture" in self.sublayers and self.ffn):
            DecoderConfig.check_feed_forward(self)
        elif "mixture" not in self.sublayers:
            self._require_unset(FEED_FORWARD_SETTINGS, "without a feed-forward; name one in model.sublayers")

    def check_attention(self) -> None:
        if "attention" in self.sublayers:
            DecoderConfig.check_attention(self)
        else:
            RecurrentConfig.check_attention(self)

    @property
    def output_gain(self) -> float:
        """Gain of each output projection: the sum of all layers' outputs keeps its scale at any depth."""
        return self.num_layers**-0.5

    @property
    def kinds(self) -> tuple[LayerKind, ...]:
        return tuple(
            kind
            if name == "attention"
            else LayerKind(0, name == "mixture", mixer=STATE_SPACE if name == "state_space" else FEED_FORWARD)
            for name, kind in zip(self.sublayers, self._attention_kinds, strict=True)
        )

    @property
    def _attention_kinds(self) -> tuple[LayerKind, ...]:
        """The kinds that the layers have if they attend."""
        return tuple(kind._replace(mixture=False) for kind in DecoderConfig.kinds.fget(self))  # pyright: ignore

    def block(self, key: jax.Array, kind: LayerKind) -> Block:
        if kind.mixer == STATE_SPACE:
            return build_state_space_block(key, self, kind, fed=False)
        return build_sublayer_block(key, self, kind)


def build_sublayer_block(key: jax.Array, config: SublayerConfig, kind: LayerKind) -> SublayerBlock:
    """Initialize one layer of attention, or of a feed-forward."""
    norm_key, key = jax.random.split(key)
    if kind.mixer == FEED_FORWARD:
        sublayer = build_feed_forward(key, config, kind, config.output_gain)
    else:
        sublayer = build_attention(iter(jax.random.split(key, 3)), config, kind, config.output_gain)
        assert isinstance(sublayer, Attention)
    return SublayerBlock(norm=norm_builder(config)(norm_key, config.embed), sublayer=sublayer, dropout=config.dropout)
