"""Root-mean-square and layer normalization."""

from typing import Literal

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from ..core import Module, constant, parameter
from ..spmd import gather

NormKind = Literal["rms", "layer", "layer_unbiased", "rms_unscaled", "layer_unscaled"]
"""Root-mean-square or layer normalization; a layer norm has a bias unless it is unbiased, an unscaled norm has
neither scale nor bias."""


class Norm(Module):
    """Normalization of the last axis in float32, followed by a scale and an optional bias.

    Attributes:
        unit_offset: True to multiply by `1 + scale` with a scale initialized with 0 (Gemma), instead of by a
            scale initialized with 1.
    """

    kind: Literal["rms", "layer"] = eqx.field(static=True)
    epsilon: float = eqx.field(static=True)
    unit_offset: bool = eqx.field(static=True)
    scale: Float[Array, " norm"] | None = parameter(constant(1.0))
    bias: Float[Array, " norm"] | None = parameter(constant(0.0))

    @classmethod
    def build(
        cls,
        key: jax.Array,
        size: int,
        *,
        kind: NormKind = "rms",
        epsilon: float = 1e-6,
        unit_offset: bool = False,
    ) -> "Norm":
        """Initialize a norm over `size` features."""
        fields: dict = {"scale": None if kind.endswith("unscaled") else constant(0.0 if unit_offset else 1.0)}
        if kind != "layer":
            fields["bias"] = None
        centered = "rms" if kind.startswith("rms") else "layer"
        return cls.create(key, {"norm": size}, kind=centered, epsilon=epsilon, unit_offset=unit_offset, **fields)

    def __call__(self, x: Float[Array, "*rest norm"], gain: float = 1.0) -> Float[Array, "*rest norm"]:
        """Normalize; the result is multiplied by `gain` before it is rounded."""
        y = x.astype(jnp.float32)
        if self.kind == "layer":
            y = y - jnp.mean(y, axis=-1, keepdims=True)
        y = y * jax.lax.rsqrt(jnp.mean(y * y, axis=-1, keepdims=True) + self.epsilon)
        ones = (1,) * (x.ndim - 1)
        if self.scale is not None:
            scale = gather(self.scale, "norm", jnp.float32)
            y = y * (scale + 1.0 if self.unit_offset else scale).reshape(*ones, -1)
        if self.bias is not None:
            y = y + gather(self.bias, "norm", jnp.float32).reshape(*ones, -1)
        return (y if gain == 1.0 else y * gain).astype(x.dtype)
