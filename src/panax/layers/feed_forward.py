"""The dense feed-forward layer, gated or plain."""

from typing import Literal

import equinox as eqx
import jax
from jaxtyping import Array, Float

from ..core import Module, constant, contract, contract_whole, gather, normal, parameter

Activation = Literal["silu", "gelu", "gelu_tanh", "relu"]

ACTIVATIONS = {
    "silu": jax.nn.silu,
    "gelu": lambda x: jax.nn.gelu(x, approximate=False),
    "gelu_tanh": lambda x: jax.nn.gelu(x, approximate=True),
    "relu": jax.nn.relu,
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

    def __call__(self, x: Float[Array, "batch residual embed"]) -> Float[Array, "batch residual embed"]:
        act = ACTIVATIONS[self.activation]
        weights = [w for w in (self.w_up, self.w_gate) if w is not None]
        up, *gate = contract_whole(x, *(("batch seq embed, embed ffn -> batch seq ffn", w) for w in weights))
        if self.b_up is not None:
            up = up + gather(self.b_up, "ffn", x.dtype)[None, None]
        hidden = act(gate[0]) * up if gate else act(up)
        down = contract("batch seq ffn, ffn embed -> batch seq embed", hidden, self.w_down)
        return down if self.b_down is None else down + gather(self.b_down, "norm", x.dtype)[None, None]
