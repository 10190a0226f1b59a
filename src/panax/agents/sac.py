"""`Sac`: a soft actor with critics, learned from a replay buffer, as a task."""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Num

from ..core import Batch, Evaluation, Loss, Mean, Metrics, Module
from ..core.errors import RecipeError
from ..environments import Action, Box
from ..environments.batch import keys_of
from .distributions import SquashedGaussian
from .off_policy import Explore, OffPolicy
from .policies import Layers, PerceptronPolicy, Policy, as_features, features_of
from .policies.perceptron import Activation
from .q_losses import soft_value, target_of, temperature_loss
from .replay import Replay

_NARROWEST, _WIDEST = -20.0, 2.0
"""Of logarithms of standard deviations."""


class Critics(Module):
    """Networks that each value an action in a state."""

    each: tuple[Layers, ...]


class SacParameters(Module):
    """What is trained.

    Attributes:
        log_temperature: Logarithm of what a nat of entropy is worth in rewards.
    """

    actor: Module
    critics: Critics
    log_temperature: Float[Array, ""]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sac(OffPolicy):
    """The soft actor-critic (arXiv:1812.05905): twin critics, a squashed Gaussian, and a temperature that keeps its entropy.

    One update moves actor, critics and temperature at once, each by its own loss at the parameters before it; the authors' code
    updates the critics first. The optimizer's learning rate is that of all three.

    Attributes:
        policy: Of the actor: means, and logarithms of standard deviations in [-20, 2]. What it says of the state's value is not
            used.
        critic_hidden: Widths of the critics' layers before the last one.
        critic_activation: Behind each of them.
        target_entropy: What the temperature keeps the entropy at, in nats, of actions in [-1, 1]; None for minus the number of an
            action's elements.
        first_temperature: Where the temperature begins.
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
        if not (isinstance(space, Box) and space.dtype == "float32" and space.bounded):
            raise RecipeError(
                f"Sac takes actions in a Box of float32 with finite bounds, and those of the environment are {space}; "
                f"take Dqn or Ppo"
            )
        if self.policy.recurrent:
            raise RecipeError(
                f"Sac draws single transitions, and {type(self.policy).__name__} has a memory; take one without, or Ppo"
            )
        if min(self.critic_hidden, default=1) < 1:
            raise RecipeError(f"task.critic_hidden={self.critic_hidden}; expected widths of 1 or more")
        if self.first_temperature <= 0.0:
            raise RecipeError(f"task.first_temperature={self.first_temperature}; expected more than 0")

    @property
    def distribution(self) -> SquashedGaussian:
        """Of actions."""
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
        seen = self.environment.observation_space
        inputs, widths = features_of(seen) + self._size, (*self.critic_hidden, 1)
        critics = tuple(Layers.build(own, inputs, widths, activation=self.critic_activation) for own in critic_keys)
        return SacParameters(
            actor=self.policy.build(actor_key, seen, 2 * self._size),
            critics=Critics(each=critics),
            log_temperature=jnp.float32(math.log(self.first_temperature)),
        )

    def followed(self, params: SacParameters) -> Critics:
        return params.critics

    def numbers(self, params: SacParameters, observation: Num[Array, "batch ..."]) -> Float[Array, "batch number"]:
        """Means, and logarithms of standard deviations."""
        _, said = self.policy.act(params.actor, self.policy.first_carry(observation.shape[0]), observation)
        mean, log_deviation = jnp.split(said.numbers, 2, axis=-1)
        return jnp.concatenate([mean, jnp.clip(log_deviation, _NARROWEST, _WIDEST)], axis=-1)

    def values(
        self, critics: Critics, observation: Num[Array, "batch ..."], unit: Float[Array, "batch element"]
    ) -> Float[Array, "critic batch"]:
        """What each critic expects of an action.

        Args:
            unit: The action, in [-1, 1].
        """
        features = as_features(observation, self.environment.observation_space)
        both = jnp.concatenate([features, unit], axis=-1)
        return jnp.stack([critic(both)[:, 0] for critic in critics.each])

    def explorer(self, params: SacParameters, replay: Replay) -> Explore:
        def explore(observation: jax.Array, keys: jax.Array) -> jax.Array:
            return jnp.tanh(self.distribution.draw(self.numbers(params, observation), keys))

        return explore

    def greedy(self, params: SacParameters, observation: Num[Array, "batch ..."]) -> Num[Array, "batch element"]:
        return jnp.tanh(self.distribution.mode(self.numbers(params, observation)))

    def random_action(self, key: jax.Array) -> Num[Array, " element"]:
        return jax.random.uniform(key, (self._size,), jnp.float32, -1.0, 1.0)

    def action(self, stored: Num[Array, "batch element"]) -> Action:
        return self.distribution.scaled(stored)

    def losses(self, params: SacParameters, state: Any, batch: Batch, key: jax.Array) -> Evaluation:
        now_key, next_key = jax.random.split(key)
        seen, following, row = batch["observation"], batch["next_observation"], batch["row"]
        held = jax.lax.stop_gradient(params)
        temperature = jnp.exp(held.log_temperature)
        next_unit, next_log_prob = self._drawn(held, following, keys_of(next_key, row))
        next_value = soft_value(self.values(state["target"], following, next_unit), next_log_prob, temperature)
        target = jax.lax.stop_gradient(
            target_of(batch["reward"], batch["terminated"], next_value, discount=self.discount)
        )
        values = self.values(params.critics, seen, batch["action"])
        critic = 0.5 * ((values - target[None]) ** 2).sum(axis=0)
        unit, log_prob = self._drawn(params, seen, keys_of(now_key, row))
        actor = -soft_value(self.values(held.critics, seen, unit), log_prob, temperature)
        aim = -float(self._size) if self.target_entropy is None else self.target_entropy
        of_temperature = temperature_loss(params.log_temperature, log_prob, target_entropy=aim)
        count = jnp.float32(critic.size)
        metrics: Metrics = {
            "action_value": Mean(values.mean(axis=0).sum(), count),
            "entropy": Mean(-log_prob.sum(), count),
            "entropy_weight": Mean(temperature, jnp.float32(1.0)),
        }
        losses = {"critic": critic, "actor": actor, "temperature": of_temperature}
        return Evaluation({name: Loss(each.sum(), count) for name, each in losses.items()}, state, metrics)

    def _drawn(
        self, params: SacParameters, observation: Num[Array, "batch ..."], keys: jax.Array
    ) -> tuple[Float[Array, "batch element"], Float[Array, " batch"]]:
        """Actions in [-1, 1], and the logarithms of their densities; gradients go through both."""
        numbers = self.numbers(params, observation)
        drawn = self.distribution.draw(numbers, keys)
        return jnp.tanh(drawn), self.distribution.log_prob(numbers, drawn)
