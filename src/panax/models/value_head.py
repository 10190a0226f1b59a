"""`ValueHead`: an estimate, at each position of a decoder, of the reward that is still to come."""

import jax.numpy as jnp
from jaxtyping import Array, Float

from ..core import Module, constant, parameter
from ..spmd import add_bias, all_gather_sequence, contract, split_cotangent

NAME = "value_head"
"""Name of the head among a decoder's parameters."""


class ValueHead(Module):
    """A linear function of the final hidden states, 0 everywhere at first."""

    w: Float[Array, "embed class"] = parameter(constant(0.0))
    b: Float[Array, " class"] = parameter(constant(0.0))

    def __call__(self, hidden: Float[Array, "batch residual embed"]) -> Float[Array, "batch seq"]:
        """Return the value of each position, in float32; equal on all devices of the axes that split no tokens."""
        equation = "batch residual embed, embed class -> batch residual class"
        values = add_bias(
            contract(equation, hidden.astype(jnp.float32), self.w, out_dtype=jnp.float32), self.b, "class"
        )
        # Each device takes its positions' values from its part of the residual stream, and all devices the same loss of them.
        return split_cotangent(all_gather_sequence(values))[..., 0]
