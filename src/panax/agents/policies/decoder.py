"""`DecoderPolicy`: a decoder that reads an observation as tokens, and outputs actions."""

import dataclasses
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Num

from ...core import Module, normal
from ...core.errors import RecipeError
from ...environments import Box, Discrete, Space
from ...layers.perceptron import Dense
from ...models import Decoder, DecoderConfig, DecoderTask
from .policy import Carry, Policy, PolicyOutput


class ActingDecoder(Module):
    """A decoder, and two linear layers that read its last position."""

    decoder: Decoder
    actor: Dense
    critic: Dense
    observations: Space = eqx.field(static=True)


@dataclasses.dataclass(frozen=True, kw_only=True)
class DecoderPolicy(Policy):
    """A decoder over the elements of an observation, which are integers, in their order.

    The module is that of language models, with the same sharding of its weights.

    Attributes:
        model: Configuration of the decoder; its vocabulary must include all values of an observation's
            elements.
    """

    model: DecoderConfig

    def build(self, key: jax.Array, observations: Space, outputs: int) -> Module:
        self._check(observations)
        keys = jax.random.split(key, 3)
        width = {"inputs": self.model.embed}
        small = normal("inputs", gain=0.01)
        return ActingDecoder(
            decoder=Decoder.build(keys[0], self.model),
            actor=Dense.create(keys[1], {**width, "hidden": outputs}, w=small),
            critic=Dense.create(keys[2], {**width, "hidden": 1}, w=normal("inputs")),
            observations=observations,
        )

    def act(self, params: Any, carry: Carry, observation: Num[Array, "batch ..."]) -> tuple[Carry, PolicyOutput]:
        tokens = observation.reshape(observation.shape[0], -1).astype(jnp.int32)
        row = jnp.arange(tokens.shape[0], dtype=jnp.int32)
        context = DecoderTask(model=self.model).context({"tokens": tokens, "row": row}, jax.random.key(0), False)
        hidden, _ = params.decoder(tokens, context, dtype=jnp.float32)
        last = hidden[:, -1]
        return carry, PolicyOutput(params.actor(last), params.critic(last)[:, 0])

    def _check(self, observations: Space) -> None:
        if isinstance(observations, Discrete):
            length, max_token = 1, observations.count - 1
        elif isinstance(observations, Box) and observations.dtype in ("int32", "uint8") and observations.is_bounded:
            length, max_token = observations.size, int(observations.upper.max())
            if observations.lower.min() < 0:
                raise RecipeError(f"DecoderPolicy reads tokens from 0 on, and observations are {observations}")
        else:
            raise RecipeError(f"DecoderPolicy reads whole numbers between finite bounds, not {observations}")
        if max_token >= self.model.vocab_size or length > self.model.max_length:
            raise RecipeError(
                f"an observation is {length} numbers up to {max_token}; the decoder takes {self.model.max_length} up to "
                f"{self.model.vocab_size - 1}: raise policy.model.max_length or vocab_size"
            )
