"""`Policy`: the network of an agent, from observations to the parameters of a distribution and a value."""

import abc
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Num

from ...core import Module
from ...core.validation import Validated
from ...environments import Discrete, Space

Carry = Any
"""Memory of a recurrent policy: a pytree of arrays with one row for each environment; () without a memory."""


class PolicyOutput(NamedTuple):
    """The outputs of a policy for observations.

    Attributes:
        distribution_params: Parameters of the distribution over actions.
        value: The expected return.
    """

    distribution_params: Float[Array, "*rows number"]
    value: Float[Array, "*rows"]


class Policy(Validated, abc.ABC):
    """Settings of a network: a frozen keyword-only dataclass. Any model is a policy if it has these
    methods."""

    @property
    def recurrent(self) -> bool:
        """Return True if `act` reads its memory: training then uses sequences of several steps of a
        rollout."""
        return False

    @abc.abstractmethod
    def build(self, key: jax.Array, observations: Space, outputs: int) -> Module:
        """Initialize the parameters.

        Args:
            outputs: Number of outputs for each observation.

        Raises:
            RecipeError: The network does not support such observations.
        """

    def initial_carry(self, rows: int) -> Carry:
        """Return the memory at the start of an episode."""
        return ()

    @abc.abstractmethod
    def act(self, params: Any, carry: Carry, observation: Num[Array, "batch ..."]) -> tuple[Carry, PolicyOutput]:
        """Compute the outputs for one step of each row."""

    def unroll(
        self,
        params: Any,
        carry: Carry,
        observations: Num[Array, "batch time ..."],
        begins: Bool[Array, "batch time"],
    ) -> PolicyOutput:
        """Compute the outputs for several steps of each row, equal to those of consecutive calls of `act`.

        Args:
            carry: Memory before the first step.
            begins: True if an episode begins with the step, so that the memory is reset.
        """
        rows, steps = begins.shape
        if not self.recurrent:
            flat = observations.reshape(rows * steps, *observations.shape[2:])
            _, outputs = self.act(params, (), flat)
            return jax.tree.map(lambda leaf: leaf.reshape(rows, steps, *leaf.shape[1:]), outputs)

        def step(carry: Carry, seen: tuple[jax.Array, jax.Array]) -> tuple[Carry, PolicyOutput]:
            return self.act(params, self.reset_carry(carry, seen[1]), seen[0])

        _, outputs = jax.lax.scan(step, carry, (observations.swapaxes(0, 1), begins.T))
        return jax.tree.map(lambda leaf: leaf.swapaxes(0, 1), outputs)

    def reset_carry(self, carry: Carry, begins: Bool[Array, " batch"]) -> Carry:
        """Reset the memory to `initial_carry` in rows that begin an episode."""

        def one(first: jax.Array, old: jax.Array) -> jax.Array:
            return jnp.where(begins.reshape(begins.shape + (1,) * (old.ndim - 1)), first, old)

        return jax.tree.map(one, self.initial_carry(begins.shape[0]), carry)


def num_features(space: Space) -> int:
    """Return the number of features per observation of `as_features`.

    >>> num_features(Discrete(count=4))
    4
    """
    if isinstance(space, Discrete):
        return space.count
    size = 1
    for each in space.abstract.shape:
        size *= each
    return size


def as_features(observation: Num[Array, "batch ..."], space: Space) -> Float[Array, "batch inputs"]:
    """Convert observations to rows of float32: choices as one-hot vectors, bytes divided by 255, all others
    flattened."""
    if isinstance(space, Discrete):
        return jax.nn.one_hot(observation, space.count, dtype=jnp.float32)
    scale = 1.0 / 255.0 if observation.dtype == jnp.uint8 else 1.0
    return observation.reshape(observation.shape[0], -1).astype(jnp.float32) * scale
