"""`Sac`: soft actor-critic from a replay buffer, as a task."""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Num

from ..core import Batch, Evaluation, Loss, Mean, Metrics, Module
from ..core.errors import RecipeError
from ..environments import Action, Box
from ..environments.batch import row_keys
from .distributions import SquashedGaussian
from .off_policy import Explore, OffPolicy
from .policies import Layers, PerceptronPolicy, Policy, as_features, num_features
from .policies.perceptron import Activation
from .q_losses import soft_value, td_target, temperature_loss
from .replay import Replay

_NARROWEST, _WIDEST = -20.0, 2.0
"""Bounds of the log standard deviations."""


class Critics(Module):
    """The critic networks, each of which estimates the value of an action in a state."""

    each: tuple[Layers, ...]


class SacParameters(Module):
    """The trained parameters of SAC.

    Attributes:
        log_temperature: Logarithm of the temperature: the reward per nat of entropy.
    """

    actor: Module
    critics: Critics
    log_temperature: Float[Array, ""]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sac(OffPolicy):
    """Soft actor-critic (arXiv:1812.05905): twin critics, a squashed Gaussian policy and a tuned temperature.

    One update changes actor, critics and temperature together, each by its loss at the parameters before the
    update; the authors' code updates the critics first. All three use the optimizer's learning rate.

    Attributes:
        policy: The actor's network; it outputs means, and log standard deviations in [-20, 2]. Its state
            value is not used.
        critic_hidden: Hidden widths of the critics.
        critic_activation: Activation after each hidden layer of the critics.
        target_entropy: Target entropy for tuning the temperature, in nats, of actions in [-1, 1]; None for
            minus the number of an action's elements.
        first_temperature: Initial temperature.
    """

    policy: Policy = PerceptronPolicy(activation="relu")  # noqa: RUF009
    critic_hidden: tuple[int, ...] = (64, 64)
    critic_activation: Activation = "relu"
    target_entropy: float | None = None
    first_temperature: float = 1.0

    name = "sac"

    def __post_init__(self) -> None:
        super().__post_init__()
        space = self.environment.action_space
        if not (isinstance(space, Box) and space.dtype == "float32" and space.is_bounded):
            raise RecipeError(
                f"Sac needs actions in a Box of float32 with finite bounds, and the environment has {space}; "
                f"use Dqn or Ppo"
            )
        if self.policy.recurrent:
            raise RecipeError(
                f"Sac draws single transitions, and {type(self.policy).__name__} has a memory; use one without, or Ppo"
            )
        if min(self.critic_hidden, default=1) < 1:
            raise RecipeError(f"task.critic_hidden={self.critic_hidden}; expected widths of 1 or more")
        if self.first_temperature <= 0.0:
            raise RecipeError(f"task.first_temperature={self.first_temperature}; expected more than 0")

    @property
    def distribution(self) -> SquashedGaussian:
        """Return the distribution of actions."""
        space = self.environment.action_space
        assert isinstance(space, Box)
        return SquashedGaussian(space=space)

    @property
    def _size(self) -> int:
        return self.distribution.space.size

    @property
    def loss_names(self) -> tuple[str, ...]:
        return ("critic", "actor", "temperature")

    @property
    def stored_action(self) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((self._size,), jnp.float32)

    def networks(self, key: jax.Array) -> SacParameters:
        actor_key, *critic_keys = jax.random.split(key, 3)
        observations = self.environment.observation_space
        inputs, widths = num_features(observations) + self._size, (*self.critic_hidden, 1)
        critics = tuple(
            Layers.build(critic_key, inputs, widths, activation=self.critic_activation) for critic_key in critic_keys
        )
        return SacParameters(
            actor=self.policy.build(actor_key, observations, 2 * self._size),
            critics=Critics(each=critics),
            log_temperature=jnp.float32(math.log(self.first_temperature)),
        )

    def target_network_source(self, params: SacParameters) -> Critics:
        return params.critics

    def distribution_params(
        self, params: SacParameters, observation: Num[Array, "batch ..."]
    ) -> Float[Array, "batch number"]:
        """Compute the means and log standard deviations of actions."""
        _, output = self.policy.act(params.actor, self.policy.initial_carry(observation.shape[0]), observation)
        mean, log_deviation = jnp.split(output.distribution_params, 2, axis=-1)
        return jnp.concatenate([mean, jnp.clip(log_deviation, _NARROWEST, _WIDEST)], axis=-1)

    def values(
        self, critics: Critics, observation: Num[Array, "batch ..."], unit: Float[Array, "batch element"]
    ) -> Float[Array, "critic batch"]:
        """Compute each critic's value of an action.

        Args:
            unit: The action, in [-1, 1].
        """
        features = as_features(observation, self.environment.observation_space)
        inputs = jnp.concatenate([features, unit], axis=-1)
        return jnp.stack([critic(inputs)[:, 0] for critic in critics.each])

    def exploration_policy(self, params: SacParameters, replay: Replay) -> Explore:
        def explore(observation: jax.Array, keys: jax.Array) -> jax.Array:
            return jnp.tanh(self.distribution.sample(self.distribution_params(params, observation), keys))

        return explore

    def greedy_action(self, params: SacParameters, observation: Num[Array, "batch ..."]) -> Num[Array, "batch element"]:
        return jnp.tanh(self.distribution.mode(self.distribution_params(params, observation)))

    def random_action(self, key: jax.Array) -> Num[Array, " element"]:
        return jax.random.uniform(key, (self._size,), jnp.float32, -1.0, 1.0)

    def action(self, stored: Num[Array, "batch element"]) -> Action:
        return self.distribution.rescale_action(stored)

    def losses(self, params: SacParameters, state: Any, batch: Batch, key: jax.Array) -> Evaluation:
        action_key, next_key = jax.random.split(key)
        observation, next_observation, row = batch["observation"], batch["next_observation"], batch["row"]
        fixed_params = jax.lax.stop_gradient(params)
        temperature = jnp.exp(fixed_params.log_temperature)
        next_unit, next_log_prob = self._sample_actions(fixed_params, next_observation, row_keys(next_key, row))
        next_value = soft_value(self.values(state["target"], next_observation, next_unit), next_log_prob, temperature)
        target = jax.lax.stop_gradient(
            td_target(batch["reward"], batch["terminated"], next_value, discount=self.discount)
        )
        values = self.values(params.critics, observation, batch["action"])
        critic = 0.5 * ((values - target[None]) ** 2).sum(axis=0)
        unit, log_prob = self._sample_actions(params, observation, row_keys(action_key, row))
        actor = -soft_value(self.values(fixed_params.critics, observation, unit), log_prob, temperature)
        target_entropy = -float(self._size) if self.target_entropy is None else self.target_entropy
        temperature_losses = temperature_loss(params.log_temperature, log_prob, target_entropy=target_entropy)
        count = jnp.float32(critic.size)
        metrics: Metrics = {
            "action_value": Mean(values.mean(axis=0).sum(), count),
            "entropy": Mean(-log_prob.sum(), count),
            "ent_coef": Mean(temperature, jnp.float32(1.0)),
        }
        losses = {"critic": critic, "actor": actor, "temperature": temperature_losses}
        return Evaluation({name: Loss(each.sum(), count) for name, each in losses.items()}, state, metrics)

    def _sample_actions(
        self, params: SacParameters, observation: Num[Array, "batch ..."], keys: jax.Array
    ) -> tuple[Float[Array, "batch element"], Float[Array, " batch"]]:
        """Sample actions in [-1, 1] and return them with their log densities; both are differentiable."""
        numbers = self.distribution_params(params, observation)
        sample = self.distribution.sample(numbers, keys)
        return jnp.tanh(sample), self.distribution.log_prob(numbers, sample)
