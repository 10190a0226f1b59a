"""Decoders with attention and state-space mixers side by side in each layer (Falcon-H1): config and layers."""

import dataclasses
import math
from typing import ClassVar

import jax

from ...core import register_serializable
from ...layers.attention.attention import Attention
from ...layers.block import Block
from ...layers.feed_forward import FeedForward
from ...layers.mixers.side_by_side_block import BranchMultipliers, SideBySideBlock
from .blocks import build_attention, build_feed_forward, norm_builder
from .config import DecoderConfig, LayerKind, require
from .mamba import HybridConfig, build_state_space

SIDE_BY_SIDE = "side_by_side"
"""The `LayerKind.mixer` of layers with both."""


@register_serializable
@dataclasses.dataclass(frozen=True, kw_only=True)
class SideBySideConfig(HybridConfig):
    """A decoder of which each layer has attention and a state-space mixer side by side, then a feed-forward.

    Attributes:
        attention_layers: Unused; all layers attend.
        key_multiplier: Factor of keys. `attention_in_multiplier` is that of the attention's input, `attention_out_multiplier` of
            its output.
        ssm_in_multiplier: Factor of the mixer's input, as `ssm_out_multiplier` is of its output.
        ssm_multipliers: Factors of the mixer's projections: gate, x, B, C and step size.
        gate_multiplier: Factor of the feed-forward's gate, as `down_multiplier` is of its output.
        rotary: None for attention without positions.
    """

    mixer: ClassVar[str] = SIDE_BY_SIDE

    ffn: int = 1024
    key_multiplier: float = 1.0
    attention_in_multiplier: float = 1.0
    attention_out_multiplier: float = 1.0
    ssm_in_multiplier: float = 1.0
    ssm_out_multiplier: float = 1.0
    ssm_multipliers: tuple[float, ...] = (1.0,) * 5
    gate_multiplier: float = 1.0
    down_multiplier: float = 1.0

    def __post_init__(self) -> None:
        require(
            not self.attention_layers,
            f"model.attention_layers={self.attention_layers}; all layers attend, leave attention_layers ()",
        )
        require(
            self.feed_forward is None, "model.feed_forward is a mixture; layers side by side are dense, leave it None"
        )
        require(self.latent is None, "model.latent with attention side by side, which has none; leave it None")
        require(
            len(self.ssm_multipliers) == 5,
            f"model.ssm_multipliers={self.ssm_multipliers}; expected 5 factors: of gate, x, B, C and step size",
        )
        multipliers = {
            field.name: getattr(self, field.name)
            for field in dataclasses.fields(self)
            if field.name.endswith("_multiplier")
        }
        for name, value in (*multipliers.items(), *(("ssm_multipliers", value) for value in self.ssm_multipliers)):
            require(0.0 < value < math.inf, f"model.{name}={value}; expected positive factors, 1 changes nothing")
        super().__post_init__()

    def check_feed_forward(self) -> None:
        DecoderConfig.check_feed_forward(self)

    def check_attention(self) -> None:
        DecoderConfig.check_attention(self)

    @property
    def output_gain(self) -> float:
        """Gain of each branch's output projection: the sum of all layers' outputs keeps its scale at any depth."""
        return (3 * self.num_layers) ** -0.5

    @property
    def kinds(self) -> tuple[LayerKind, ...]:
        return tuple(kind._replace(mixer=SIDE_BY_SIDE) for kind in DecoderConfig.kinds.fget(self))  # pyright: ignore

    def block(self, key: jax.Array, kind: LayerKind) -> Block:
        return build_side_by_side_block(key, self, kind)


def build_side_by_side_block(key: jax.Array, config: SideBySideConfig, kind: LayerKind) -> SideBySideBlock:
    """Initialize one layer."""
    attention_key, mixer_key, feed_key, norm_key = jax.random.split(key, 4)
    norm, gain = norm_builder(config), config.output_gain
    attention = build_attention(iter(jax.random.split(attention_key, 3)), config, kind, gain)
    feed_forward = build_feed_forward(feed_key, config, kind, gain)
    assert isinstance(attention, Attention) and isinstance(feed_forward, FeedForward)
    if config.key_multiplier != 1.0:
        # A factor of keys is one of scores.
        factor = attention.w_q.shape[-1] ** -0.5 if attention.scale is None else attention.scale
        attention = dataclasses.replace(attention, scale=factor * config.key_multiplier)
    return SideBySideBlock(
        norm=norm(norm_key, config.embed),
        attention=attention,
        mixer=build_state_space(mixer_key, config, config.ssm_multipliers),
        feed_forward_norm=norm(norm_key, config.embed),
        feed_forward=dataclasses.replace(feed_forward, gate_multiplier=config.gate_multiplier),
        multipliers=BranchMultipliers(
            config.attention_in_multiplier,
            config.attention_out_multiplier,
            config.ssm_in_multiplier,
            config.ssm_out_multiplier,
            config.down_multiplier,
        ),
        dropout=config.dropout,
    )
