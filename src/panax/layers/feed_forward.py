"""Dense feed-forward layer, gated or plain."""

import functools
import math
from collections.abc import Callable
from typing import Literal

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from ..core import Module, constant, normal, parameter
from ..kernels.precision import accumulation_dtype
from ..spmd import add_bias, contract, contract_gathered

Activation = Literal["silu", "gelu", "gelu_tanh", "relu", "relu_squared"]
"""Activation function of a feed-forward layer; `gelu_tanh` is the tanh approximation."""


def _recomputed(
    function: Callable[[jax.Array], jax.Array], slope: Callable[[jax.Array], jax.Array] | None = None
) -> Callable[[jax.Array], jax.Array]:
    """Wrap `function` to run in float32 and to save only its input, in the stored dtype, for the derivative.

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


class FeedForward(Module):
    """`down(activation(gate(x)) * up(x))`, or `down(activation(up(x)))` without a gate.

    Source: GLU variants improve Transformer (arXiv:2002.05202).
    """

    activation: Activation = eqx.field(static=True)
    w_gate: Float[Array, "embed ffn"] | None = parameter(normal("embed"))
    w_up: Float[Array, "embed ffn"] = parameter(normal("embed"))
    w_down: Float[Array, "ffn embed"] = parameter(normal("ffn"))
    b_up: Float[Array, " ffn"] | None = parameter(constant(0.0))
    b_down: Float[Array, " norm"] | None = parameter(constant(0.0))

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
        output_gain: float = 1.0,
    ) -> "FeedForward":
        fields: dict = {"w_down": normal("ffn", gain=output_gain)}
        if not gated:
            fields["w_gate"] = None
        if not bias:
            fields |= {"b_up": None, "b_down": None}
        return cls.create(key, {"embed": embed, "ffn": ffn, "norm": embed}, activation=activation, **fields)

    @property
    def flops(self) -> float:
        """FLOPs of one layer's forward matmuls per position."""
        return 2.0 * sum(math.prod(w.shape) for w in (self.w_gate, self.w_up, self.w_down) if w is not None)

    def __call__(self, x: Float[Array, "batch residual embed"]) -> Float[Array, "batch residual embed"]:
        act = ACTIVATIONS[self.activation]
        weights = [w for w in (self.w_up, self.w_gate) if w is not None]
        up, *gate = contract_gathered(x, *(("batch seq embed, embed ffn -> batch seq ffn", w) for w in weights))
        if self.b_up is not None:
            up = add_bias(up, self.b_up, "ffn")
        hidden = act(gate[0]) * up if gate else act(up)
        down = contract("batch seq ffn, ffn embed -> batch seq embed", hidden, self.w_down)
        return down if self.b_down is None else add_bias(down, self.b_down, "norm")
