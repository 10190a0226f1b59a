"""Decoders with recurrent mixers in some layers or all: the common part of their configs."""

import abc
import dataclasses
import functools
from typing import ClassVar

import jax

from ...layers.block import Block
from .config import DecoderConfig, LayerKind, require

ATTENTION_SETTINGS = (
    "heads", "kv_heads", "head_dim", "head_sizes", "latent", "qk_norm", "qk_norm_scope", "qk_norm_after_rotary",
    "qk_norm_layers", "window_kind", "alibi_slopes", "attention_bias", "attention_output_bias", "attention_gate",
    "rotary", "rotaries", "windows", "attention_sinks", "attention_clip", "attention_soft_cap", "query_scale",
)  # fmt: skip
"""Fields that have no effect if no layer attends."""

FEED_FORWARD_SETTINGS = ("gated", "activation", "feed_forward_bias", "feed_forward")
"""Fields that have no effect if no layer has a feed-forward."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class RecurrentConfig(DecoderConfig, abc.ABC):
    """A decoder in which some layers have a recurrent mixer and the others attention.

    It has no learned positions: the recurrence is ordered, and attention is rotary or relies on the recurrence.

    Attributes:
        mixer: The `LayerKind.mixer` of the recurrent layers.
        attention_only: True if attention may be in all layers.
        attention_layers: Indices of the attention layers, ascending; the others have a recurrent mixer.
        ffn: Width of the feed-forward layer; 0 for none, in a model without attention.
        rotary: None for attention without positions.
    """

    mixer: ClassVar[str]
    attention_only: ClassVar[bool] = False

    attention_layers: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        require(self.num_layers > 0, f"model.num_layers={self.num_layers}; expected a positive number")
        layers = self.attention_layers
        require(
            list(layers) == sorted({layer for layer in layers if 0 <= layer < self.num_layers}),
            f"model.attention_layers={layers}; expected ascending numbers below num_layers={self.num_layers}",
        )
        require(
            self.attention_only or len(layers) < self.num_layers,
            f"model.attention_layers={layers} are all layers; use a DecoderConfig, or leave some to recurrent mixers",
        )
        require(
            self.norm == "rms" and not self.post_norms,
            f"model.norm={self.norm!r}, post_norms={self.post_norms}; expected 'rms' and False, which recurrent layers have",
        )
        for name, default in (("pre_norms", True), ("parallel_residual", False), ("residual_multiplier", 1.0)):
            require(
                getattr(self, name) == default,
                f"model.{name}={getattr(self, name)!r}; recurrent layers have {default!r} only",
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

    def require_positive(self, *names: str) -> None:
        """Raise a RecipeError if one of these fields is not a positive number."""
        for name in names:
            require(getattr(self, name) > 0, f"model.{name}={getattr(self, name)}; expected a positive number")

    def _require_unset(self, names: tuple[str, ...], why: str) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            require(
                field.name not in names or value == field.default,
                f"model.{field.name}={value!r} has no effect {why}, or leave it {field.default!r}",
            )

    @property
    def output_gain(self) -> float:
        """Gain of each branch's output projection: the sum of all layers' outputs keeps its scale at any depth."""
        return ((2 if self.ffn else 1) * self.num_layers) ** -0.5

    @property
    def learned_positions(self) -> bool:
        return False

    @property
    def kinds(self) -> tuple[LayerKind, ...]:
        attending = set(self.attention_layers)
        return tuple(
            kind if layer in attending else kind._replace(window=0, rotary=None, heads=None, mixer=self.mixer)
            for layer, kind in enumerate(super().kinds)
        )

    @property
    def stacks(self) -> tuple[tuple[tuple[LayerKind, ...], int], ...]:
        """The layers as (period, repeats), fewest layers in total: one period of two if every second layer
        attends."""
        return _shortest(self.kinds)

    def block(self, key: jax.Array, kind: LayerKind) -> Block:
        return self.recurrent_block(key, kind) if kind.mixer == self.mixer else super().block(key, kind)

    @abc.abstractmethod
    def recurrent_block(self, key: jax.Array, kind: LayerKind) -> Block:
        """Initialize one layer with a recurrent mixer."""


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
