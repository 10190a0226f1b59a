"""`Dqn`: deep Q-learning from a replay buffer, as a task."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Num

from ..core import Batch, Evaluation, Loss, Mean, Metrics, Module
from ..core.errors import RecipeError
from ..environments import Discrete
from .off_policy import Explore, OffPolicy
from .policies import PerceptronPolicy, Policy
from .q_losses import ErrorForm, action_value, best_value, dueling_values, td_loss, td_target
from .replay import Replay


class DqnParameters(Module):
    """The trained parameters of DQN: a network that outputs the values of actions."""

    policy: Module


@dataclasses.dataclass(frozen=True, kw_only=True)
class Dqn(OffPolicy):
    """Deep Q-learning (arXiv:1312.5602) with a target network; optionally double and dueling.

    Attributes:
        policy: The network; it outputs the values of actions. Its state value is used only if `dueling`.
        double: Double Q-learning: the online network selects the best next action, the target network
            evaluates it.
        dueling: Compute action values from the state's value and each action's advantage.
        error: "huber" (linear beyond an error of 1) or "squared".
        epsilon: The fractions of random actions at the start and at the end of the schedule.
        epsilon_steps: Length of the schedule, in steps of all environments including those of `warmup`.
    """

    policy: Policy = PerceptronPolicy(activation="relu", first_gain=1.0)  # noqa: RUF009
    double: bool = True
    dueling: bool = False
    error: ErrorForm = "huber"
    epsilon: tuple[float, float] = (1.0, 0.05)
    epsilon_steps: int = 20_000

    name = "dqn"

    def __post_init__(self) -> None:
        super().__post_init__()
        space = self.environment.action_space
        if not isinstance(space, Discrete):
            raise RecipeError(f"Dqn needs discrete actions, and the environment has {space}; use Sac or Ppo")
        if self.policy.recurrent:
            raise RecipeError(
                f"Dqn draws single transitions, and {type(self.policy).__name__} has a memory; use one without, or Ppo"
            )
        if not all(0.0 <= share <= 1.0 for share in self.epsilon):
            raise RecipeError(f"task.epsilon={self.epsilon}; expected shares of actions, in [0, 1]")
        if self.epsilon_steps < 1:
            raise RecipeError(f"task.epsilon_steps={self.epsilon_steps}; expected 1 or more")

    @property
    def _count(self) -> int:
        space = self.environment.action_space
        assert isinstance(space, Discrete)
        return space.count

    @property
    def stored_action(self) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((), jnp.int32)

    def networks(self, key: jax.Array) -> DqnParameters:
        return DqnParameters(policy=self.policy.build(key, self.environment.observation_space, self._count))

    def target_network_source(self, params: DqnParameters) -> DqnParameters:
        return params

    def values(self, params: DqnParameters, observation: Num[Array, "batch ..."]) -> Float[Array, "batch action"]:
        """Compute the expected return of each action."""
        _, output = self.policy.act(params.policy, self.policy.initial_carry(observation.shape[0]), observation)
        return dueling_values(output.distribution_params, output.value) if self.dueling else output.distribution_params

    def current_epsilon(self, replay: Replay) -> Float[Array, ""]:
        """Return the current fraction of random actions."""
        first, last = self.epsilon
        # Converted first: the product exceeds 2**31 after minutes of fast environments.
        done = replay.added.astype(jnp.float32) * self.environments / self.epsilon_steps
        return first + (last - first) * jnp.minimum(done, 1.0)

    def exploration_policy(self, params: DqnParameters, replay: Replay) -> Explore:
        epsilon = self.current_epsilon(replay)

        def explore(observation: jax.Array, keys: jax.Array) -> jax.Array:
            def one(key: jax.Array, best: jax.Array) -> jax.Array:
                whether, which = jax.random.split(key)
                return jnp.where(jax.random.uniform(whether) < epsilon, self.random_action(which), best)

            return jax.vmap(one)(keys, self.greedy_action(params, observation))

        return explore

    def greedy_action(self, params: DqnParameters, observation: Num[Array, "batch ..."]) -> Num[Array, " batch"]:
        return self.values(params, observation).argmax(axis=-1).astype(jnp.int32)

    def exploration_metrics(self, replay: Replay) -> Metrics:
        return {"epsilon": Mean(self.current_epsilon(replay), jnp.float32(1.0))}

    def losses(self, params: DqnParameters, state: Any, batch: Batch, key: jax.Array) -> Evaluation:
        value = action_value(self.values(params, batch["observation"]), batch["action"])
        following = batch["next_observation"]
        online_values = jax.lax.stop_gradient(self.values(params, following)) if self.double else None
        next_value = best_value(self.values(state["target"], following), online_values)
        target = td_target(batch["reward"], batch["terminated"], next_value, discount=self.discount)
        error = td_loss(value, jax.lax.stop_gradient(target), form=self.error)
        count = jnp.float32(error.size)
        metrics: Metrics = {
            "action_value": Mean(value.sum(), count),
            "temporal_difference": Mean(jnp.abs(value - target).sum(), count),
        }
        return Evaluation({"value": Loss(error.sum(), count)}, state, metrics)
