"""Root-mean-square and layer normalization."""

from typing import Literal

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from ..core import Module, constant, parameter
from ..kernels.row_functions import NormParameters, NormRule, normalize_rows
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
        scale = None if self.scale is None else gather(self.scale, "norm", jnp.float32)
        if scale is not None and self.unit_offset:
            scale = scale + 1.0
        bias = None if self.bias is None else gather(self.bias, "norm", jnp.float32)
        return normalize_rows(x, NormParameters(scale, bias), NormRule(self.kind == "layer", self.epsilon, gain))
