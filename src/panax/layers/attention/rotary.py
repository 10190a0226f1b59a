"""Rotary position embedding.

Source: RoFormer (arXiv:2104.09864); features are paired across the two halves of a head, as in `transformers`
and Llama's released weights, unless `interleaved` is set.
"""

import abc
import dataclasses
import math
from typing import ClassVar, Literal

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from ...core.errors import RecipeError
from ...core.validation import Validated


def _require(holds: bool, message: str) -> None:
    if not holds:
        raise RecipeError(f"rotary.{message}")


def _require_factor(factor: float) -> None:
    _require(
        1.0 <= factor < math.inf,
        f"scaling.factor={factor}; expected 1 or more: it is how much longer the context becomes",
    )


def _require_extension(factor: float, original_length: int) -> None:
    _require_factor(factor)
    _require(
        original_length > 0,
        f"scaling.original_length={original_length}; expected the positive length that the model was trained with",
    )


class _Interpolation(Validated):
    """A scaling that divides a fraction of each frequency by `factor` and leaves the other fraction unscaled."""

    factor: float

    max_positions: ClassVar[int | None] = None
    """The longest row that it supports; None for any."""

    @abc.abstractmethod
    def unscaled_fraction(self, frequency: np.ndarray, theta: float) -> np.ndarray:
        """Return the unscaled fraction of each frequency: 1 leaves it unchanged, 0 divides it by `factor`;
        clipped by the caller."""

    def scale(self, frequency: np.ndarray, theta: float) -> np.ndarray:
        """Return the scaled frequencies."""
        unscaled = np.clip(self.unscaled_fraction(frequency, theta), 0.0, 1.0)
        return (1 - unscaled) * frequency / self.factor + unscaled * frequency


@dataclasses.dataclass(frozen=True, kw_only=True)
class LinearScaling(_Interpolation):
    """Context extension by position interpolation: all frequencies are divided by `factor`.

    Source: "Extending Context Window of Large Language Models via Positional Interpolation" (arXiv:2306.15595).
    """

    factor: float = 8.0

    def __post_init__(self) -> None:
        _require_factor(self.factor)

    def check(self, head_dim: int, theta: float) -> None:
        """Accept any width of a head."""

    def unscaled_fraction(self, frequency: np.ndarray, theta: float) -> np.ndarray:
        """Return zeros: every frequency is divided by `factor`."""
        return np.zeros_like(frequency)

    @property
    def amplitude(self) -> float:
        return 1.0

    @property
    def score_gain(self) -> float:
        return 1.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class DynamicScaling(LinearScaling):
    """Context extension that begins in rows longer than `max_length` (dynamic NTK); rows are never longer
    here, so it has no effect except that it is exported."""

    def unscaled_fraction(self, frequency: np.ndarray, theta: float) -> np.ndarray:
        """Return ones: no frequency is scaled."""
        return np.ones_like(frequency)


@dataclasses.dataclass(frozen=True, kw_only=True)
class RotaryScaling(_Interpolation):
    """Context extension of Llama 3.1: low frequencies are divided by `factor`, with a smooth transition.

    Source: "The Llama 3 Herd of Models" (arXiv:2407.21783), section 3.4, and the released configuration.
    """

    factor: float = 8.0
    low_frequency_factor: float = 1.0
    high_frequency_factor: float = 4.0
    original_length: int = 8192

    def __post_init__(self) -> None:
        _require_extension(self.factor, self.original_length)
        low, high = self.low_frequency_factor, self.high_frequency_factor
        _require(
            0.0 < low < high < math.inf,
            f"scaling.low_frequency_factor={low}, high_frequency_factor={high}; expected positive numbers, the low one below the "
            f"high one: frequencies between them are mixed",
        )

    def check(self, head_dim: int, theta: float) -> None:
        """Accept any width of a head."""

    def unscaled_fraction(self, frequency: np.ndarray, theta: float) -> np.ndarray:
        """Return the unscaled fraction of each frequency: 1 leaves it unchanged, 0 divides it by `factor`;
        clipped by the caller."""
        turns = self.original_length * frequency / (2 * math.pi)
        return (turns - self.low_frequency_factor) / (self.high_frequency_factor - self.low_frequency_factor)

    @property
    def amplitude(self) -> float:
        return 1.0

    @property
    def score_gain(self) -> float:
        return 1.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class YarnScaling(_Interpolation):
    """Context extension of YaRN: as in Llama 3.1, but with a transition linear in the pair's index, and
    scaled scores.

    Attributes:
        fast: Pairs that make more turns than this within `original_length` keep their frequency.
        slow: Pairs that make fewer turns have their frequency divided by `factor`.
        mscale: Rotated features are multiplied by `m(mscale) / m(mscale_all_dim)`, m(x) = 0.1 x ln(factor) +
            1.
        mscale_all_dim: Scores are multiplied by `m(mscale_all_dim) ** 2`; m(0) is 1. DeepSeek uses 1 and 1:
            only scores are scaled.
        attention_factor: Rotated features are multiplied by this instead; 0 leaves it to `mscale`.
        truncate: Round the transition's ends to whole pairs.

    Source: YaRN (arXiv:2309.00071), section 3.2; the second `mscale` is from DeepSeek-V2's released
    configuration.
    """

    factor: float = 40.0
    original_length: int = 4096
    fast: float = 32.0
    slow: float = 1.0
    mscale: float = 1.0
    mscale_all_dim: float = 0.0
    attention_factor: float = 0.0
    truncate: bool = True

    def __post_init__(self) -> None:
        _require_extension(self.factor, self.original_length)
        _require(
            0.0 < self.slow <= self.fast < math.inf,
            f"scaling.slow={self.slow}, fast={self.fast}; expected positive numbers of turns, slow not above fast: what turns "
            f"more often than fast keeps its frequency, what turns less often than slow is divided",
        )
        for name in ("mscale", "mscale_all_dim", "attention_factor"):
            value = getattr(self, name)
            _require(0.0 <= value < math.inf, f"scaling.{name}={value}; expected 0 or more")

    def check(self, head_dim: int, theta: float) -> None:
        """Raise a RecipeError if no pair of features of a head of this width is between `fast` and `slow`."""
        first, last = self._transition(head_dim // 2, theta)
        _require(
            first <= last,
            f"scaling: with theta={theta}, original_length={self.original_length} and {head_dim} rotated features, the "
            f"transition would run from pair {first:g} down to pair {last:g}; expected slow={self.slow} and fast={self.fast} "
            f"turns to lie among the pairs: change them, theta or original_length",
        )

    def unscaled_fraction(self, frequency: np.ndarray, theta: float) -> np.ndarray:
        """Return the unscaled fraction of each frequency: 1 leaves it unchanged, 0 divides it by `factor`;
        clipped by the caller."""
        pairs = len(frequency)
        first, last = self._transition(pairs, theta)
        return 1.0 - (np.arange(pairs, dtype=np.float32) - first) / max(last - first, 1e-3)

    def _transition(self, pairs: int, theta: float) -> tuple[float, float]:
        """Return the indices of the pairs between which frequencies are interpolated."""

        def pair_that_turns(times: float) -> float:
            return pairs * math.log(self.original_length / (times * 2 * math.pi)) / math.log(theta)

        first, last = pair_that_turns(self.fast), pair_that_turns(self.slow)
        if self.truncate:
            first, last = math.floor(first), math.ceil(last)
        return max(first, 0), min(last, 2 * pairs - 1)

    @property
    def amplitude(self) -> float:
        """Factor of rotated features."""
        return self.attention_factor or self._growth(self.mscale) / self._growth(self.mscale_all_dim)

    @property
    def score_gain(self) -> float:
        """Factor of scores."""
        return self._growth(self.mscale_all_dim) ** 2

    def _growth(self, mscale: float) -> float:
        return 0.1 * mscale * math.log(self.factor) + 1.0 if self.factor > 1 else 1.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class LongScaling(Validated):
    """Context extension of LongRoPE: each frequency is divided by a factor of its own, from one of two lists.

    Attributes:
        short: Factors for rows of at most `original_length` positions, one for each pair of features.
        long: Factors for longer rows.
        extended_length: The length up to which the model was extended.
        attention_factor: Rotated features are multiplied by this; 0 takes `sqrt(1 + ln(extended_length /
            original_length) / ln(original_length))`.
        use: The list in use. With "short" the model accepts no longer rows.

    Source: LongRoPE (arXiv:2402.13753), section 3, and the released configurations of Phi-3.
    """

    short: tuple[float, ...]
    long: tuple[float, ...]
    original_length: int
    extended_length: int
    attention_factor: float = 0.0
    use: Literal["short", "long"] = "short"

    def __post_init__(self) -> None:
        _require_extension(self.extended_length / max(self.original_length, 1), self.original_length)
        _require(self.original_length > 1, "scaling.original_length=1; expected 2 or more")
        for name in ("short", "long"):
            factors = getattr(self, name)
            _require(
                all(0.0 < factor < math.inf for factor in factors),
                f"scaling.{name}={factors}; expected positive factors",
            )
        _require(
            0.0 <= self.attention_factor < math.inf,
            f"scaling.attention_factor={self.attention_factor}; expected 0 or more",
        )

    def check(self, head_dim: int, theta: float) -> None:
        """Raise a RecipeError if a list does not have one factor for each pair of features of such a head."""
        for name in ("short", "long"):
            count = len(getattr(self, name))
            _require(
                2 * count == head_dim,
                f"scaling.{name} has {count} factors; expected {head_dim // 2}, one for each pair of {head_dim} features",
            )

    def scale(self, frequency: np.ndarray, theta: float) -> np.ndarray:
        """Return the frequencies with their factors."""
        return frequency / np.asarray(self.short if self.use == "short" else self.long, np.float32)

    @property
    def max_positions(self) -> int | None:
        """The longest row that it supports; None for any."""
        return self.original_length if self.use == "short" else None

    @property
    def amplitude(self) -> float:
        """Factor of rotated features."""
        growth = math.log(self.extended_length / self.original_length)
        return self.attention_factor or math.sqrt(1.0 + growth / math.log(self.original_length))

    @property
    def score_gain(self) -> float:
        return 1.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rotary(Validated):
    """Rotation of queries and keys by their position.

    Attributes:
        theta: Base of the wavelengths, which range from 2π to 2π·theta positions.
        interleaved: True if features (0, 1), (2, 3), ... form pairs (DeepSeek's released weights) instead of
            (0, width / 2), ... In both cases the result has the first features of all pairs before the second
            ones; scores do not depend on the order.
        fraction: Fraction of a head's features to rotate, counted from the first; the others are unchanged. 0 rotates
            none: queries grow, and layers have no other positions (Llama 4).
        query_growth: Queries are multiplied by `1 + query_growth * ln(1 + floor((position + query_first) / query_length))`,
            so that attention stays as sharp over long rows (Llama 4, Ministral 3).
        query_length: See `query_growth`; 0 without.
        query_first: See `query_growth`: the number by which positions are counted from the first one on.
    """

    theta: float = 10_000.0
    scaling: LinearScaling | DynamicScaling | RotaryScaling | YarnScaling | LongScaling | None = None
    interleaved: bool = False
    fraction: float = 1.0
    query_growth: float = 0.0
    query_length: int = 0
    query_first: int = 0

    def __post_init__(self) -> None:
        _require(1.0 < self.theta < math.inf, f"theta={self.theta}; expected a number above 1")
        _require(
            0.0 < self.fraction <= 1.0 or (self.fraction == 0.0 and self.query_growth > 0.0 and self.scaling is None),
            f"fraction={self.fraction}; expected a part of a head's width in (0, 1], or 0 with query_growth and no scaling",
        )
        _require(
            self.query_first >= 0 and (self.query_growth > 0.0 or not self.query_first),
            f"query_first={self.query_first}; expected 0 or more, and 0 without query_growth",
        )
        _require(
            0.0 <= self.query_growth < math.inf
            and self.query_length >= 0
            and (self.query_length > 0) == (self.query_growth > 0.0),
            f"query_growth={self.query_growth}, query_length={self.query_length}; expected both positive, or both 0",
        )

    def check(self, head_dim: int) -> None:
        """Raise a RecipeError if heads of this width cannot be rotated."""
        turned = self.num_rotated(head_dim)
        part = "" if self.fraction == 1.0 else f", of which fraction={self.fraction} is {turned}"
        _require(
            turned % 2 == 0 and (turned > 0 or self.fraction == 0.0),
            f"head_dim={head_dim}{part}; expected an even number: rotary embedding turns pairs of features",
        )
        if self.scaling is not None:
            self.scaling.check(turned, self.theta)

    def num_rotated(self, head_dim: int) -> int:
        """Return the number of rotated features of a head.

        >>> Rotary(fraction=0.5).num_rotated(128)
        64
        """
        return int(head_dim * self.fraction)

    def frequencies(self, head_dim: int) -> np.ndarray:
        """Return the radians per position of each rotated pair of features; float32."""
        turned = self.num_rotated(head_dim)
        frequency = 1.0 / self.theta ** (np.arange(0, turned, 2, dtype=np.float32) / turned)
        if self.scaling is None:
            return frequency.astype(np.float32)
        return self.scaling.scale(frequency, self.theta).astype(np.float32)

    @property
    def score_gain(self) -> float:
        """Additional factor of scores."""
        return 1.0 if self.scaling is None else self.scaling.score_gain

    def grow_queries(
        self, q: Float[Array, "batch seq heads head_dim"], position: Int[Array, "batch seq"]
    ) -> Float[Array, "batch seq heads head_dim"]:
        """Multiply queries by `query_growth`."""
        if not self.query_growth:
            return q
        counted = position + self.query_first if self.query_first else position
        growth = 1.0 + self.query_growth * jnp.log1p((counted // self.query_length).astype(jnp.float32))
        return (q.astype(jnp.float32) * growth[..., None, None]).astype(q.dtype)

    def __call__(
        self, x: Float[Array, "batch seq heads head_dim"], position: Int[Array, "batch seq"]
    ) -> Float[Array, "batch seq heads head_dim"]:
        if self.fraction == 0.0:
            return x
        angle = (
            position.astype(jnp.float32)[..., None, None] * jnp.asarray(self.frequencies(x.shape[-1]))[None, None, None]
        )
        amplitude = 1.0 if self.scaling is None else self.scaling.amplitude
        cos, sin = jnp.cos(angle) * amplitude, jnp.sin(angle) * amplitude
        turned = self.num_rotated(x.shape[-1])
        pairs = x[..., :turned].astype(jnp.float32)
        first, second = (pairs[..., 0::2], pairs[..., 1::2]) if self.interleaved else jnp.split(pairs, 2, axis=-1)
        rotated = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1).astype(x.dtype)
        return rotated if turned == x.shape[-1] else jnp.concatenate([rotated, x[..., turned:]], axis=-1)
