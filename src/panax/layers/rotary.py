"""Rotary position embedding.

Source: RoFormer (arXiv:2104.09864); halves are rotated against each other as in `transformers` and Llama's released weights.
"""

import dataclasses
import math

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int


@dataclasses.dataclass(frozen=True, kw_only=True)
class RotaryScaling:
    """Llama 3.1's extension of the context: low frequencies are divided by `factor`, with a smooth transition.

    Source: "The Llama 3 Herd of Models" (arXiv:2407.21783), section 3.4, and the released configuration.
    """

    factor: float = 8.0
    low_frequency_factor: float = 1.0
    high_frequency_factor: float = 4.0
    original_length: int = 8192


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rotary:
    """Rotation of query and key by their position.

    Attributes:
        theta: Base of the wavelengths, which run from 2π to 2π·theta positions.
    """

    theta: float = 10_000.0
    scaling: RotaryScaling | None = None

    def frequencies(self, head_dim: int) -> np.ndarray:
        """Radians per position of each pair of features; float32 of `head_dim / 2`."""
        frequency = 1.0 / self.theta ** (np.arange(0, head_dim, 2, dtype=np.float32) / head_dim)
        if self.scaling is None:
            return frequency.astype(np.float32)
        s = self.scaling
        turns = s.original_length * frequency / (2 * math.pi)
        smooth = (turns - s.low_frequency_factor) / (s.high_frequency_factor - s.low_frequency_factor)
        smooth = np.clip(smooth, 0.0, 1.0)
        return ((1 - smooth) * frequency / s.factor + smooth * frequency).astype(np.float32)

    def __call__(
        self, x: Float[Array, "batch seq heads head_dim"], position: Int[Array, "batch seq"]
    ) -> Float[Array, "batch seq heads head_dim"]:
        angle = (
            position.astype(jnp.float32)[..., None, None] * jnp.asarray(self.frequencies(x.shape[-1]))[None, None, None]
        )
        cos, sin = jnp.cos(angle), jnp.sin(angle)
        first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
        rotated = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
        return rotated.astype(x.dtype)
