"""State-space decoders (Mamba-2) and hybrids with attention in some layers: config, layers and presets."""

import dataclasses
import math
from typing import ClassVar

import jax

from ...core import register_serializable
from ...layers.attention.rotary import Rotary
from ...layers.mixers.state_space import StateSpace
from ...layers.mixers.state_space_block import StateSpaceBlock
from .blocks import build_feed_forward, norm_builder
from .config import DecoderConfig, LayerKind, require
from .recurrent import RecurrentConfig

STATE_SPACE = "state_space"
"""The `LayerKind.mixer` of state-space layers."""


@register_serializable
@dataclasses.dataclass(frozen=True, kw_only=True)
class HybridConfig(RecurrentConfig):
    """A decoder of state-space layers only (Mamba-2), or with attention in some layers (Bamba).

    It has no learned positions: the recurrence is ordered, and attention is rotary or relies on the
    recurrence.

    Attributes:
        attention_layers: Indices of the attention layers, ascending; the others have a state-space mixer.
        ffn: Width of the feed-forward layer; 0 for none, in a model without attention.
        ssm_heads: Number of heads of a state-space mixer.
        ssm_head_dim: Width of a head; `ssm_heads * ssm_head_dim` is the mixer's inner width, usually `2 *
            embed`.
        ssm_groups: Number of groups of adjacent heads that share B and C (the state's input and output
            projections) and are normalized together.
        ssm_state: State size N: columns of a head's state.
        conv_taps: Kernel width of the convolution before the scan.
        conv_bias: True if the convolution has a bias.
        ssm_norm: Normalize the gated outputs of mixers, each group of heads separately.
        ssm_step_floor: Smallest step size of the recurrence (Nemotron-H).
        rotary: None for attention without positions.
    """

    ffn: int = 0
    ssm_heads: int = 8
    ssm_head_dim: int = 64
    ssm_groups: int = 1
    ssm_state: int = 128
    conv_taps: int = 4
    conv_bias: bool = True
    ssm_norm: bool = True
    ssm_step_floor: float = 0.0

    mixer: ClassVar[str] = STATE_SPACE

    def __post_init__(self) -> None:
        self.require_positive("ssm_heads", "ssm_head_dim", "ssm_groups", "ssm_state", "conv_taps")
        require(
            0.0 <= self.ssm_step_floor < math.inf,
            f"model.ssm_step_floor={self.ssm_step_floor}; expected 0 or a positive step size",
        )
        require(
            self.ssm_heads % self.ssm_groups == 0,
            f"model.ssm_heads={self.ssm_heads} is not divisible by ssm_groups={self.ssm_groups}; each group serves an equal "
            f"number of heads",
        )
        super().__post_init__()

    @property
    def stacks(self) -> tuple[tuple[tuple[LayerKind, ...], int], ...]:
        """The layers as (period, repeats), fewest layers in total: one period of two if every second layer
        attends.

        >>> [(len(period), n) for period, n in HybridConfig(num_layers=6, attention_layers=(1, 3, 5), ffn=64).stacks]
        [(2, 3)]
        >>> [(len(period), n) for period, n in HybridConfig(num_layers=6, attention_layers=(3,), ffn=64).stacks]
        [(1, 3), (1, 1), (1, 2)]
        """
        return super().stacks

    def recurrent_block(self, key: jax.Array, kind: LayerKind) -> StateSpaceBlock:
        return build_state_space_block(key, self, kind, fed=self.ffn > 0)


def build_state_space_block(key: jax.Array, config: HybridConfig, kind: LayerKind, *, fed: bool) -> StateSpaceBlock:
    """Initialize one state-space layer.

    Args:
        fed: True for a feed-forward after the mixer.
    """
    mixer_key, feed_key, norm_key = jax.random.split(key, 3)
    norm = norm_builder(config)
    mixer = build_state_space(mixer_key, config)
    return StateSpaceBlock(
        mixer_norm=norm(norm_key, config.embed),
        mixer=mixer,
        feed_forward_norm=norm(norm_key, config.embed) if fed else None,
        feed_forward=build_feed_forward(feed_key, config, kind, config.output_gain) if fed else None,
        dropout=config.dropout,
    )


def build_state_space(key: jax.Array, config: HybridConfig, multipliers: tuple[float, ...] = ()) -> StateSpace:
    """Initialize a state-space mixer.

    Args:
        multipliers: Factors of its projections.
    """
    factors = () if all(each == 1.0 for each in multipliers) else multipliers
    return StateSpace.build(
        key,
        config.embed,
        heads=config.ssm_heads,
        head_dim=config.ssm_head_dim,
        groups=config.ssm_groups,
        state=config.ssm_state,
        taps=config.conv_taps,
        conv_bias=config.conv_bias,
        norm_by_group=True,
        step_floor=config.ssm_step_floor,
        multipliers=factors,
        norm=config.ssm_norm,
        epsilon=config.norm_epsilon,
        output_gain=config.output_gain,
    )


def mamba2(*, embed: int, num_layers: int) -> HybridConfig:
    """Return the config of a released Mamba-2 model.

    They were trained on 2,048 tokens per row; nothing in the model depends on that.

    Source: "Transformers are SSMs" (arXiv:2405.21060), and the released configurations of
        state-spaces/mamba2.
    """
    return HybridConfig(
        vocab_size=50288,
        max_length=1 << 20,
        embed=embed,
        num_layers=num_layers,
        ssm_heads=2 * embed // 64,
        norm_epsilon=1e-5,
        tied=True,
    )


def bamba() -> HybridConfig:
    """Return the config of Bamba-9B.

    Source: the released configuration of ibm-fms/Bamba-9B, and the sequence length that `transformers` uses
        for it.
    """
    return HybridConfig(
        vocab_size=128256,
        max_length=262144,
        embed=4096,
        num_layers=32,
        attention_layers=(9, 18, 27),
        heads=32,
        kv_heads=8,
        ffn=14336,
        ssm_heads=128,
        norm_epsilon=1e-5,
        rotary=Rotary(fraction=0.5),
        tied=False,
    )


MAMBA_PRESETS: dict[str, DecoderConfig] = {
    "mamba2_130m": mamba2(embed=768, num_layers=24),
    "mamba2_370m": mamba2(embed=1024, num_layers=48),
    "mamba2_780m": mamba2(embed=1536, num_layers=48),
    "mamba2_1.3b": mamba2(embed=2048, num_layers=48),
    "mamba2_2.7b": mamba2(embed=2560, num_layers=64),
    "bamba_9b": bamba(),
}

MAMBA_PUBLISHED_PARAMETERS: dict[str, int] = {
    "mamba2_130m": 128_989_632,
    "mamba2_370m": 368_346_624,
    "mamba2_780m": 780_161_280,
    "mamba2_1.3b": 1_343_757_312,
    "mamba2_2.7b": 2_702_599_680,
    "bamba_9b": 9_780_235_392,
}
