"""Rollouts: several steps in all environments with a fixed policy."""

from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Key, Num

from ..core import DataChecks
from ..core.measures import NO_FAULT, as_fault
from ..environments import Environment, EnvironmentBatch, EnvironmentState
from ..environments.batch import step_keys
from .distributions import Distribution
from .episodes import FinishedEpisodes
from .policies import Carry, Policy

CHECKS = (
    "the environment returned a reward that is not finite: ",
    "the environment returned an observation that is not finite: ",
)


class RolloutState(eqx.Module):
    """The state from which the next rollout continues; every leaf has the leading axis `environment`.

    Attributes:
        ongoing: State of the current episodes.
        memory: The policy's memory.
        begins: True if the next observation is an episode's first.
        finished: The last episode of each environment that ended.
    """

    ongoing: EnvironmentState
    memory: Carry
    begins: Bool[Array, " environment"]
    finished: FinishedEpisodes

    @classmethod
    def initial(
        cls, environment: Environment, policy: Policy, environments: int, key: Key[Array, ""]
    ) -> "RolloutState":
        ongoing = EnvironmentBatch(environment).reset(key, jnp.arange(environments, dtype=jnp.int32))
        begins = jnp.ones(environments, jnp.bool_)
        return cls(ongoing, policy.initial_carry(environments), begins, FinishedEpisodes.empty(environments))


class Rollout(NamedTuple):
    """The transitions of a rollout; every leaf is (time, environment, ...).

    Attributes:
        observation: The environment's observation, unprocessed.
        memory: The policy's memory before the step.
        is_first: True if `observation` is an episode's first.
        sampled_action: The sample of the distribution.
        log_prob: Log probability of the sample.
        value: Predicted value of `observation`.
        final_observation: The next observation, before any reset.
        final_value: Predicted value of `final_observation` if the policy is recurrent; else 0, to be computed
            afterwards in one pass.
    """

    observation: Num[Array, "time environment ..."]
    memory: Any
    is_first: Bool[Array, "time environment"]
    sampled_action: Num[Array, "time environment ..."]
    log_prob: Float[Array, "time environment"]
    value: Float[Array, "time environment"]
    reward: Float[Array, "time environment"]
    terminated: Bool[Array, "time environment"]
    truncated: Bool[Array, "time environment"]
    final_observation: Num[Array, "time environment ..."]
    final_value: Float[Array, "time environment"]


class Actor(NamedTuple):
    """A policy with its parameters.

    Attributes:
        normalize_observation: Function from an observation to the policy's input.
        distribution_params: Function from the policy's outputs to the distribution's parameters.
    """

    policy: Policy
    params: Any
    distribution: Distribution
    normalize_observation: Any
    distribution_params: Any


def collect_rollout(
    environment: Environment,
    actor: Actor,
    acting: RolloutState,
    row: Int[Array, " environment"],
    key: Key[Array, ""],
    steps: int,
) -> tuple[RolloutState, Rollout]:
    """Take `steps` steps in each environment.

    Args:
        row: The global index of each environment, which seeds its random bits.
    """
    batch, policy, distribution = EnvironmentBatch(environment), actor.policy, actor.distribution

    def step(rollout_state: RolloutState, keys: tuple[Any, Any]) -> tuple[RolloutState, Rollout]:
        act_keys, move_keys = keys
        observation = actor.normalize_observation(rollout_state.ongoing.observation)
        memory, output = policy.act(actor.params, rollout_state.memory, observation)
        numbers = actor.distribution_params(output.distribution_params)
        sample = distribution.sample(numbers, act_keys)
        moved = batch.step_with_keys(rollout_state.ongoing, distribution.action(sample), move_keys)
        final_value = jnp.zeros_like(output.value)
        if policy.recurrent:
            final_observation = actor.normalize_observation(moved.final_observation)
            final_value = policy.act(actor.params, memory, final_observation)[1].value
        after = RolloutState(
            moved.environment_state,
            policy.reset_carry(memory, moved.ended),
            moved.ended,
            rollout_state.finished.update(moved),
        )
        return after, Rollout(
            rollout_state.ongoing.observation,
            rollout_state.memory,
            rollout_state.begins,
            sample,
            distribution.log_prob(numbers, sample),
            output.value,
            moved.reward,
            moved.terminated,
            moved.truncated,
            moved.final_observation,
            final_value,
        )

    return jax.lax.scan(step, acting, step_keys(key, row, steps))


def next_values(actor: Actor, rollout: Rollout) -> Float[Array, "time environment"]:
    """Return the value of each step's next state, before any reset.

    If the episode continues, it is the value recorded at the next step. Values of the states in which
    episodes were truncated are computed in one more pass, which is skipped if there are none.
    """
    if actor.policy.recurrent:
        return rollout.final_value

    def values(observation: Num[Array, "rows ..."]) -> Float[Array, " rows"]:
        return actor.policy.act(actor.params, (), actor.normalize_observation(observation))[1].value

    last = values(rollout.final_observation[-1])
    following = jnp.concatenate([rollout.value[1:], last[None]])

    def of_cut() -> Float[Array, "time environment"]:
        # Environments first: the axis that is sharded over devices stays in place.
        by_environment = rollout.final_observation.swapaxes(0, 1)
        final_values = values(by_environment.reshape(-1, *by_environment.shape[2:])).reshape(by_environment.shape[:2])
        return jnp.where(rollout.truncated, final_values.T, following)

    return jax.lax.cond(rollout.truncated.any(), of_cut, lambda: following)


def check_rollout(reward: Num[Array, "..."], observation: Num[Array, "..."]) -> DataChecks:
    """Check rewards and observations for values that are not finite.

    Args:
        observation: Next observations, before any reset.
    """

    def worst(values: Num[Array, "..."]) -> jax.Array:
        if not jnp.issubdtype(values.dtype, jnp.floating):
            return jnp.float32(NO_FAULT)
        # A sum, since a NaN may be lost in a maximum.
        is_finite = jnp.isfinite(values)
        total = as_fault(jnp.where(is_finite, 0.0, values).sum().astype(jnp.float32))
        return jnp.where(is_finite.all(), NO_FAULT, total)

    return DataChecks(jnp.stack([worst(reward), worst(observation)]), CHECKS)
