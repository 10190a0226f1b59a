"""State-space decoders (Mamba-2) and hybrids with attention in some layers: config, layers and presets."""

import dataclasses
import functools

import jax

from ...core import register_serializable
from ...layers.attention.rotary import Rotary
from ...layers.block import Block
from ...layers.mixers.state_space import StateSpace
from ...layers.mixers.state_space_block import StateSpaceBlock
from .blocks import build_feed_forward, norm_builder
from .config import DecoderConfig, LayerKind, require

STATE_SPACE = "state_space"
"""The `LayerKind.mixer` of state-space layers."""

ATTENTION_SETTINGS = (
    "heads", "kv_heads", "head_dim", "latent", "qk_norm", "qk_norm_scope", "qk_norm_after_rotary", "attention_bias",
    "attention_output_bias", "rotary", "rotaries", "windows", "attention_clip", "attention_soft_cap", "query_scale",
)  # fmt: skip
"""Fields that have no effect if no layer attends."""

FEED_FORWARD_SETTINGS = ("gated", "activation", "feed_forward_bias", "feed_forward")
"""Fields that have no effect if no layer has a feed-forward."""


@register_serializable
@dataclasses.dataclass(frozen=True, kw_only=True)
class HybridConfig(DecoderConfig):
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
        rotary: None for attention without positions.
    """

    attention_layers: tuple[int, ...] = ()
    ffn: int = 0
    ssm_heads: int = 8
    ssm_head_dim: int = 64
    ssm_groups: int = 1
    ssm_state: int = 128
    conv_taps: int = 4
    conv_bias: bool = True

    def __post_init__(self) -> None:
        for name in ("ssm_heads", "ssm_head_dim", "ssm_groups", "ssm_state", "conv_taps"):
            require(getattr(self, name) > 0, f"model.{name}={getattr(self, name)}; expected a positive number")
        require(
            self.ssm_heads % self.ssm_groups == 0,
            f"model.ssm_heads={self.ssm_heads} is not divisible by ssm_groups={self.ssm_groups}; each group serves an equal "
            f"number of heads",
        )
        require(self.num_layers > 0, f"model.num_layers={self.num_layers}; expected a positive number")
        layers = self.attention_layers
        require(
            list(layers) == sorted({layer for layer in layers if 0 <= layer < self.num_layers}),
            f"model.attention_layers={layers}; expected ascending numbers below num_layers={self.num_layers}",
        )
        require(
            len(layers) < self.num_layers,
            f"model.attention_layers={layers} are all layers; use a DecoderConfig, or leave some to state-space mixers",
        )
        require(
            self.norm == "rms" and not self.post_norms,
            f"model.norm={self.norm!r}, post_norms={self.post_norms}; expected 'rms' and False, which state-space layers have",
        )
        for name, default in (("pre_norms", True), ("parallel_residual", False), ("residual_multiplier", 1.0)):
            require(
                getattr(self, name) == default,
                f"model.{name}={getattr(self, name)!r}; state-space layers have {default!r} only",
            )
        super().__post_init__()

    def check_feed_forward(self) -> None:
        if self.ffn or self.attention_layers:
            super().check_feed_forward()
        else:
            self._require_unset(FEED_FORWARD_SETTINGS, "without a feed-forward; set model.ffn")

    def check_attention(self) -> None:
        if self.attention_layers:
            super().check_attention()
        else:
            self._require_unset(ATTENTION_SETTINGS, "without attention; set model.attention_layers")

    def _require_unset(self, names: tuple[str, ...], why: str) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            require(
                field.name not in names or value == field.default,
                f"model.{field.name}={value!r} has no effect {why}, or leave it {field.default!r}",
            )

    @property
    def learned_positions(self) -> bool:
        return False

    @property
    def kinds(self) -> tuple[LayerKind, ...]:
        attending = set(self.attention_layers)
        return tuple(
            kind if layer in attending else kind._replace(window=0, mixer=STATE_SPACE)
            for layer, kind in enumerate(super().kinds)
        )

    @property
    def stacks(self) -> tuple[tuple[tuple[LayerKind, ...], int], ...]:
        """The layers as (period, repeats), fewest layers in total: one period of two if every second layer
        attends.

        >>> [(len(period), n) for period, n in HybridConfig(num_layers=6, attention_layers=(1, 3, 5), ffn=64).stacks]
        [(2, 3)]
        >>> [(len(period), n) for period, n in HybridConfig(num_layers=6, attention_layers=(3,), ffn=64).stacks]
        [(1, 3), (1, 1), (1, 2)]
        """
        return _shortest(self.kinds)

    def block(self, key: jax.Array, kind: LayerKind) -> Block:
        return build_state_space_block(key, self, kind) if kind.mixer == STATE_SPACE else super().block(key, kind)


@functools.lru_cache(maxsize=64)
def _shortest(kinds: tuple[LayerKind, ...]) -> tuple[tuple[tuple[LayerKind, ...], int], ...]:
    """Split the layers into (period, repeats) with the fewest layers in total, then the shortest periods.

    A pipeline keeps each period on one stage.
    """
    count = len(kinds)
    best: list[tuple[int, int, tuple]] = [(0, 0, ())] * (count + 1)
    for first in reversed(range(count)):
        splits = []
        for length in range(1, count - first + 1):
            period, end = kinds[first : first + length], first + length
            while kinds[end : end + length] == period:
                end += length
            places, stacks, rest = best[end]
            splits.append((length + places, stacks - 1, ((period, (end - first) // length), *rest)))
        best[first] = min(splits, key=lambda split: split[:2])
    return best[0][2]


def build_state_space_block(key: jax.Array, config: HybridConfig, kind: LayerKind) -> StateSpaceBlock:
    """Initialize one state-space layer."""
    mixer_key, feed_key, norm_key = jax.random.split(key, 3)
    # The sum of all layers' outputs keeps its scale at any depth.
    output_gain = ((2 if config.ffn else 1) * config.num_layers) ** -0.5
    norm = norm_builder(config)
    mixer = StateSpace.build(
        mixer_key,
        config.embed,
        heads=config.ssm_heads,
        head_dim=config.ssm_head_dim,
        groups=config.ssm_groups,
        state=config.ssm_state,
        taps=config.conv_taps,
        conv_bias=config.conv_bias,
        norm_by_group=True,
        epsilon=config.norm_epsilon,
        output_gain=output_gain,
    )
    return StateSpaceBlock(
        mixer_norm=norm(norm_key, config.embed),
        mixer=mixer,
        feed_forward_norm=norm(norm_key, config.embed) if config.ffn else None,
        feed_forward=build_feed_forward(feed_key, config, kind, output_gain) if config.ffn else None,
        dropout=config.dropout,
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
