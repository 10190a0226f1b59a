"""Dense feed-forward layer, gated or plain."""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Literal

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from ..core import Module, constant, normal, parameter
from ..core.errors import RecipeError
from ..core.validation import Validated
from ..kernels.precision import accumulation_dtype
from ..spmd import add_bias, contract, contract_gathered

Activation = Literal["silu", "gelu", "gelu_tanh", "relu", "relu_squared"]
"""Activation function of a feed-forward layer; `gelu_tanh` is the tanh approximation."""


def _recomputed(
    function: Callable[[jax.Array], jax.Array], slope: Callable[[jax.Array], jax.Array] | None = None
) -> Callable[[jax.Array], jax.Array]:
    """Wrap `function` to run in float32 and to save only its input, in the input's dtype, for the derivative.

    Args:
        slope: The derivative; None to let JAX compute it.
    """

    def wide(x: jax.Array) -> jax.Array:
        return x.astype(accumulation_dtype(x.dtype))

    @jax.custom_vjp
    def apply(x: jax.Array) -> jax.Array:
        return function(wide(x)).astype(x.dtype)

    def backward(x: jax.Array, gradient: jax.Array) -> tuple[jax.Array]:
        if slope is None:
            _, derivative = jax.vjp(function, wide(x))
            return (derivative(wide(gradient))[0].astype(x.dtype),)
        return ((wide(gradient) * slope(wide(x))).astype(x.dtype),)

    apply.defvjp(lambda x: (apply(x), x), backward)
    return apply


def _gelu(x: jax.Array) -> jax.Array:
    # PyTorch's formula. The erfc of jax.nn takes five times as long on CPU.
    return x * 0.5 * (1.0 + jax.lax.erf(x * 0.5**0.5))


def _gelu_slope(x: jax.Array) -> jax.Array:
    # The double negation keeps XLA from merging this erf with the forward pass's and storing it.
    normal = jnp.exp(-0.5 * x * x) * (2.0 * math.pi) ** -0.5
    return 0.5 * (1.0 - jax.lax.erf(x * -(0.5**0.5))) + x * normal


ACTIVATIONS = {
    "silu": _recomputed(jax.nn.silu),
    "gelu": _recomputed(_gelu, _gelu_slope),
    "gelu_tanh": _recomputed(functools.partial(jax.nn.gelu, approximate=True)),
    "relu": jax.nn.relu,
    "relu_squared": _recomputed(lambda x: jnp.square(jax.nn.relu(x))),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class GateClamp(Validated):
    """Bounds of a gated layer, in place of its activation: `g * sigmoid(slope * g) * (u + 1)`, where g is the gate cut
    off above `limit`, and u the other projection between `-limit` and `limit`.

    Source: gpt-oss (arXiv:2508.10925), section 2.3, and the code released with it.
    """

    slope: float = 1.702
    limit: float = 7.0

    def __post_init__(self) -> None:
        for name in ("slope", "limit"):
            if not 0.0 < getattr(self, name) < math.inf:
                raise RecipeError(f"model.gate_clamp.{name}={getattr(self, name)}; expected a positive number")


def activate(
    activation: Activation, clamp: GateClamp | None, gate: Float[Array, "..."] | None, up: Float[Array, "..."]
) -> Float[Array, "..."]:
    """Compute the hidden features of a feed-forward layer from its first projections; a plain layer passes no gate."""
    if gate is None:
        return ACTIVATIONS[activation](up)
    return ACTIVATIONS[activation](gate) * up if clamp is None else _clamped(clamp, gate, up)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _clamped(clamp: GateClamp, gate: jax.Array, up: jax.Array) -> jax.Array:
    wide = accumulation_dtype(gate.dtype)
    return _clamp_in_float32(clamp, gate.astype(wide), up.astype(wide)).astype(gate.dtype)


def _clamp_in_float32(clamp: GateClamp, gate: jax.Array, up: jax.Array) -> jax.Array:
    # Selections, and not minima: a value at its bound has the gradient of those inside.
    gate = jnp.where(gate <= clamp.limit, gate, clamp.limit)
    up = jnp.where(jnp.abs(up) <= clamp.limit, up, jnp.sign(up) * clamp.limit)
    return gate * jax.nn.sigmoid(clamp.slope * gate) * (up + 1.0)


def _clamped_backward(
    clamp: GateClamp, saved: tuple[jax.Array, jax.Array], gradient: jax.Array
) -> tuple[jax.Array, jax.Array]:
    gate, up = saved
    wide = accumulation_dtype(gate.dtype)
    _, derivative = jax.vjp(functools.partial(_clamp_in_float32, clamp), gate.astype(wide), up.astype(wide))
    d_gate, d_up = derivative(gradient.astype(wide))
    return d_gate.astype(gate.dtype), d_up.astype(up.dtype)


_clamped.defvjp(lambda clamp, gate, up: (_clamped(clamp, gate, up), (gate, up)), _clamped_backward)


class FeedForward(Module):
    """`down(activation(gate(x)) * up(x))`, or `down(activation(up(x)))` without a gate.

    Source: GLU variants improve Transformer (arXiv:2002.05202).

    Attributes:
        clamp: Bounds of a gated layer, in place of its activation.
        gate_multiplier: Factor of the gate, before its activation.
    """

    activation: Activation = eqx.field(static=True)
    w_gate: Float[Array, "embed ffn"] | None = parameter(normal("embed"))
    w_up: Float[Array, "embed ffn"] = parameter(normal("embed"))
    w_down: Float[Array, "ffn embed"] = parameter(normal("ffn"))
    b_up: Float[Array, " ffn"] | None = parameter(constant(0.0))
    b_down: Float[Array, " norm"] | None = parameter(constant(0.0))
    clamp: GateClamp | None = eqx.field(static=True, default=None)
    gate_multiplier: float = eqx.field(static=True, default=1.0)

    @classmethod
    def build(
        cls,
        key: jax.Array,
        embed: int,
        ffn: int,
        *,
        gated: bool,
        bias: bool,
        activation: Activation,
        clamp: GateClamp | None = None,
        output_gain: float = 1.0,
    ) -> "FeedForward":
        fields: dict = {"w_down": normal("ffn", gain=output_gain)}
        if not gated:
            fields["w_gate"] = None
        if not bias:
            fields |= {"b_up": None, "b_down": None}
        return cls.create(
            key, {"embed": embed, "ffn": ffn, "norm": embed}, activation=activation, clamp=clamp, **fields
        )

    @property
    def flops(self) -> float:
        """FLOPs of one layer's forward matmuls per position."""
        return 2.0 * sum(math.prod(w.shape) for w in (self.w_gate, self.w_up, self.w_down) if w is not None)

    def __call__(self, x: Float[Array, "batch residual embed"]) -> Float[Array, "batch residual embed"]:
        weights = [w for w in (self.w_up, self.w_gate) if w is not None]
        up, *gate = contract_gathered(x, *(("batch seq embed, embed ffn -> batch seq ffn", w) for w in weights))
        if self.b_up is not None:
            up = add_bias(up, self.b_up, "ffn")
        if self.gate_multiplier != 1.0:
            gate = [each * self.gate_multiplier for each in gate]
        hidden = activate(self.activation, self.clamp, gate[0] if gate else None, up)
        down = contract("batch seq ffn, ffn embed -> batch seq embed", hidden, self.w_down)
        return down if self.b_down is None else add_bias(down, self.b_down, "norm")
