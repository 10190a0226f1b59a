"""Perceptron policies: `PerceptronPolicy`, and the network of any agent that reads features."""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any, Literal

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Num

from ...core import Module, normal
from ...core.errors import RecipeError
from ...environments import Space
from ...layers.perceptron import Dense
from .policy import Carry, Policy, PolicyOutput, as_features, num_features

Activation = Literal["tanh", "relu", "silu"]

ACTIVATIONS: dict[str, Callable[[jax.Array], jax.Array]] = {
    "tanh": jnp.tanh,
    "relu": jax.nn.relu,
    "silu": jax.nn.silu,
}


class Layers(Module):
    """Dense layers with an activation after each one but the last, which is linear."""

    layers: tuple[Dense, ...]
    activation: str = eqx.field(static=True)

    @classmethod
    def build(
        cls, key: jax.Array, inputs: int, widths: Sequence[int], *, activation: Activation, last_gain: float = 1.0
    ) -> "Layers":
        """Initialize layers of these widths.

        Args:
            last_gain: Gain of the last layer's weights; small for a policy, so that it first explores all
                actions.
        """
        keys = jax.random.split(key, len(widths))
        layers = []
        for number, (size, width) in enumerate(zip([inputs, *widths[:-1]], widths)):
            gain = last_gain if number == len(widths) - 1 else math.sqrt(2.0)
            sizes = {"inputs": size, "hidden": width}
            layers.append(Dense.create(keys[number], sizes, w=normal("inputs", gain=gain)))
        return cls(layers=tuple(layers), activation=activation)

    def __call__(self, x: Float[Array, "batch inputs"]) -> Float[Array, "batch hidden"]:
        for layer in self.layers[:-1]:
            x = ACTIVATIONS[self.activation](layer(x))
        return self.layers[-1](x)


class ActorCritic(Module):
    """Two perceptrons without shared parameters."""

    actor: Layers
    critic: Layers
    observations: Space = eqx.field(static=True)


@dataclasses.dataclass(frozen=True, kw_only=True)
class PerceptronPolicy(Policy):
    """A perceptron for the actions, and another one for the value.

    Attributes:
        hidden: Widths of the hidden layers of both perceptrons.
        activation: Activation after each hidden layer.
        first_gain: Initial gain of the actor's last layer; the smaller, the closer the initial policy is to
            uniform.
    """

    hidden: tuple[int, ...] = (64, 64)
    activation: Activation = "tanh"
    first_gain: float = 0.01

    def __post_init__(self) -> None:
        if min(self.hidden, default=1) < 1:
            raise RecipeError(f"PerceptronPolicy.hidden={self.hidden}; expected widths of 1 or more")

    def build(self, key: jax.Array, observations: Space, outputs: int) -> Module:
        actor_key, critic_key = jax.random.split(key)
        inputs = num_features(observations)
        actor = Layers.build(
            actor_key, inputs, (*self.hidden, outputs), activation=self.activation, last_gain=self.first_gain
        )
        critic = Layers.build(critic_key, inputs, (*self.hidden, 1), activation=self.activation)
        return ActorCritic(actor=actor, critic=critic, observations=observations)

    def act(self, params: Any, carry: Carry, observation: Num[Array, "batch ..."]) -> tuple[Carry, PolicyOutput]:
        features = as_features(observation, params.observations)
        return carry, PolicyOutput(params.actor(features), params.critic(features)[:, 0])
