"""`RecurrentPolicy`: a policy with a memory, for partial observations."""

import dataclasses
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Num

from ...core import Module, normal
from ...core.errors import RecipeError
from ...environments import Space
from ...layers.perceptron import Dense
from .perceptron import ACTIVATIONS, Activation, Layers
from .policy import Carry, Policy, PolicyOutput, as_features, num_features


class GatedUnit(Module):
    """A gated recurrent unit.

    Source: arXiv:1406.1078, with the reset gate after the recurrent matmul as in cuDNN, so that one matmul
    serves all gates.
    """

    from_input: Dense
    from_memory: Dense

    @classmethod
    def build(cls, key: jax.Array, inputs: int, width: int) -> "GatedUnit":
        first, second = jax.random.split(key)
        one = normal("inputs")
        return cls(
            from_input=Dense.create(first, {"inputs": inputs, "hidden": 3 * width}, w=one),
            from_memory=Dense.create(second, {"inputs": width, "hidden": 3 * width}, w=one),
        )

    def __call__(
        self, memory: Float[Array, "batch hidden"], x: Float[Array, "batch inputs"]
    ) -> Float[Array, "batch hidden"]:
        reset_x, update_x, new_x = jnp.split(self.from_input(x), 3, axis=-1)
        reset_m, update_m, new_m = jnp.split(self.from_memory(memory), 3, axis=-1)
        update = jax.nn.sigmoid(update_x + update_m)
        new = jnp.tanh(new_x + jax.nn.sigmoid(reset_x + reset_m) * new_m)
        return update * memory + (1.0 - update) * new


class RecurrentActorCritic(Module):
    """One layer and one recurrent unit, followed by two perceptrons."""

    enter: Layers
    unit: GatedUnit
    actor: Layers
    critic: Layers
    observations: Space = eqx.field(static=True)


@dataclasses.dataclass(frozen=True, kw_only=True)
class RecurrentPolicy(Policy):
    """A gated recurrent unit after one layer, with a hidden layer for the actions and one for the value.

    Attributes:
        memory: Size of the memory.
        hidden: Width of each layer.
        first_gain: As in `PerceptronPolicy`.
    """

    memory: int = 64
    hidden: int = 64
    activation: Activation = "tanh"
    first_gain: float = 0.01

    def __post_init__(self) -> None:
        if min(self.memory, self.hidden) < 1:
            raise RecipeError(f"memory={self.memory}, hidden={self.hidden}; expected 1 or more of each")

    @property
    def recurrent(self) -> bool:
        return True

    def initial_carry(self, rows: int) -> Carry:
        return jnp.zeros((rows, self.memory), jnp.float32)

    def build(self, key: jax.Array, observations: Space, outputs: int) -> Module:
        keys = jax.random.split(key, 4)

        def layers(key: jax.Array, inputs: int, widths: tuple[int, ...], gain: float = 1.0) -> Layers:
            return Layers.build(key, inputs, widths, activation=self.activation, last_gain=gain)

        return RecurrentActorCritic(
            enter=layers(keys[0], num_features(observations), (self.hidden,)),
            unit=GatedUnit.build(keys[1], self.hidden, self.memory),
            actor=layers(keys[2], self.memory, (self.hidden, outputs), self.first_gain),
            critic=layers(keys[3], self.memory, (self.hidden, 1)),
            observations=observations,
        )

    def act(self, params: Any, carry: Carry, observation: Num[Array, "batch ..."]) -> tuple[Carry, PolicyOutput]:
        entered = ACTIVATIONS[self.activation](params.enter(as_features(observation, params.observations)))
        memory = params.unit(carry, entered)
        return memory, PolicyOutput(params.actor(memory), params.critic(memory)[:, 0])
