"""`Ppo`: proximal policy optimization as a task."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Num, Shaped

from ..core import (
    Batch,
    CollectionResult,
    Evaluation,
    Loss,
    Mean,
    Metrics,
    Module,
    Sum,
)
from ..core.errors import RecipeError
from ..core.measures import Scalar
from ..environments import Box
from .advantages import gae
from .agent import Agent
from .distributions import Continuous, Distribution, make_distribution
from .episodes import Act
from .policies import PerceptronPolicy, Policy
from .ppo_losses import ValueClip, approx_kl, clip_indicator, explained_variance, policy_loss, value_loss
from .rollouts import Actor, Rollout, RolloutState, check_rollout, collect_rollout, next_values
from .statistics import Statistics

_LIMIT = 10.0
"""Clipping bound of normalized observations and rewards, as in gymnasium and stable-baselines3."""

_MEMORY = "memory"


class PpoParameters(Module):
    """The trained parameters of PPO.

    Attributes:
        log_deviation: Logarithms of the standard deviations of continuous actions, the same for every
            observation.
    """

    policy: Module
    log_deviation: Float[Array, " hidden"] | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Ppo(Agent):
    """Proximal policy optimization (arXiv:1707.06347): collect a rollout, then make several passes over it.

    A collection takes `steps` steps in each of `environments` environments; one step of the run is
    `rollouts_per_step` collections, each with `epochs * minibatches` updates. A minibatch has equally many steps of
    every environment, in a random order per environment, so no step leaves the device of its environment.

    Attributes:
        epochs: Passes over a collection.
        minibatches: Updates in each pass.
        bptt_length: Length of truncated backpropagation through time: consecutive steps per training
            sequence of a recurrent policy.
        discount: Discount factor per step (gamma).
        gae_lambda: Lambda of generalized advantage estimation.
        clip: Clip range of the probability ratio around 1.
        dual_clip: Bound of the loss of actions with a negative advantage, as a multiple of the advantage;
            None for none.
        value_clip: Clip range of a value around the old one; None for none.
        value_clip_form: See `ppo_losses.value_loss`.
        target_kl: Updates of a collection stop once the policy's KL divergence from the old one
            exceeds 1.5 times this.
        ent_coef: Coefficient of the entropy bonus.
        vf_coef: Coefficient of half the squared error of values.
        normalize_advantages: Normalize advantages to mean 0 and deviation 1 in each minibatch.
        normalize_observations: Normalize by the mean and variance of all observations before this collection.
        normalize_rewards: Divide by the standard deviation of the discounted return so far.
        continuous: Distribution of continuous actions.
        init_log_std: Initial log standard deviation of continuous actions.
        stochastic_eval: Sample actions in evaluations as in training, instead of the most likely ones.
    """

    policy: Policy = PerceptronPolicy()  # noqa: RUF009
    environments: int = 16
    steps: int = 128
    epochs: int = 4
    minibatches: int = 4
    bptt_length: int = 1
    discount: float = 0.99
    gae_lambda: float = 0.95
    clip: float = 0.2
    dual_clip: float | None = None
    value_clip: float | None = None
    value_clip_form: ValueClip = "larger"
    target_kl: float | None = None
    ent_coef: float = 0.0
    vf_coef: float = 1.0
    normalize_advantages: bool = True
    normalize_observations: bool = False
    normalize_rewards: bool = False
    continuous: Continuous = "gaussian"
    init_log_std: float = 0.0
    stochastic_eval: bool = False

    name = "ppo"

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("epochs", "minibatches", "bptt_length"):
            if getattr(self, name) < 1:
                raise RecipeError(f"task.{name}={getattr(self, name)}; expected 1 or more")
        for name in ("discount", "gae_lambda"):
            if not 0.0 <= getattr(self, name) <= 1.0:
                raise RecipeError(f"task.{name}={getattr(self, name)}; expected a number in [0, 1]")
        for name, least in (("clip", 0.0), ("value_clip", 0.0), ("dual_clip", 1.0), ("target_kl", 0.0)):
            if getattr(self, name) is not None and getattr(self, name) <= least:
                raise RecipeError(f"task.{name}={getattr(self, name)}; expected more than {least:g}")
        if self.vf_coef < 0.0:
            raise RecipeError(f"task.vf_coef={self.vf_coef}; expected 0 or more")
        if self.bptt_length > 1 and not self.policy.recurrent:
            raise RecipeError(
                f"task.bptt_length={self.bptt_length} has no effect: {type(self.policy).__name__} has no memory; "
                f"remove it"
            )
        if self.steps % (self.bptt_length * self.minibatches):
            raise RecipeError(
                f"task.steps={self.steps} does not divide into minibatches={self.minibatches} of pieces of "
                f"bptt_length={self.bptt_length} steps; use a multiple of {self.bptt_length * self.minibatches}"
            )
        space = self.environment.observation_space
        if self.normalize_observations and not (isinstance(space, Box) and space.dtype == "float32"):
            raise RecipeError(f"task.normalize_observations is for a Box of float32, and observations are {space}")
        _ = self.distribution

    @property
    def distribution(self) -> Distribution:
        """Return the distribution of actions."""
        return make_distribution(self.environment.action_space, self.continuous)

    @property
    def updates(self) -> int:
        return self.epochs * self.minibatches

    @property
    def may_stop_early(self) -> bool:
        return self.target_kl is not None

    def init(self, key: jax.Array) -> tuple[PpoParameters, dict[str, Any]]:
        policy_key, acting_key = jax.random.split(key)
        space, family = self.environment.observation_space, self.distribution
        count = family.num_log_stds
        deviation = jnp.full((count,), self.init_log_std, jnp.float32) if count else None
        params = PpoParameters(policy=self.policy.build(policy_key, space, family.num_outputs), log_deviation=deviation)
        state: dict[str, Any] = {
            "acting": RolloutState.initial(self.environment, self.policy, self.environments, acting_key)
        }
        if self.normalize_observations:
            state["observations"] = Statistics.create(space.abstract.shape)
        if self.normalize_rewards:
            state["returns"] = Statistics.create(())
            state["discounted"] = jnp.zeros(self.environments, jnp.float32)
        return params, state

    def state_axes(self, state: Any) -> Any:
        by_environment = ("acting", "discounted")
        return {
            name: jax.tree.map(
                lambda leaf, name=name: (
                    (("environment",) if name in by_environment else (None,) * min(1, leaf.ndim))
                    + (None,) * (leaf.ndim - 1)
                ),
                part,
            )
            for name, part in state.items()
        }

    def actor(self, params: PpoParameters, state: Mapping[str, Any]) -> Actor:
        """Return the actor with these parameters and the observation statistics in `state`."""
        statistics = state.get("observations")

        def normalize(observation: Num[Array, "batch ..."]) -> Num[Array, "batch ..."]:
            return observation if statistics is None else statistics.normalize(observation, _LIMIT)

        def numbers(distribution_params: Float[Array, "*rows param"]) -> Float[Array, "*rows number"]:
            if params.log_deviation is None:
                return distribution_params
            return jnp.concatenate(
                [distribution_params, jnp.broadcast_to(params.log_deviation, distribution_params.shape)], axis=-1
            )

        return Actor(self.policy, params.policy, self.distribution, normalize, numbers)

    def collect(
        self, params: PpoParameters, state: Mapping[str, Any], batch: Batch, key: jax.Array
    ) -> CollectionResult:
        actor, (act_key, order_key) = self.actor(params, state), jax.random.split(key)
        acting, rollout = collect_rollout(self.environment, actor, state["acting"], batch["row"], act_key, self.steps)
        new_state = {**state, "acting": acting}
        if self.normalize_observations:
            new_state["observations"] = state["observations"].update(rollout.observation)
        reward, of_rewards = self._rewards(state, rollout)
        advantages = gae(
            reward,
            rollout.value,
            next_values(actor, rollout),
            rollout.terminated,
            rollout.truncated,
            discount=self.discount,
            gae_lambda=self.gae_lambda,
        )
        transitions = {
            "observation": actor.normalize_observation(rollout.observation),
            "sampled_action": rollout.sampled_action,
            "log_prob": rollout.log_prob,
            "value": rollout.value,
            "advantage": advantages.advantage,
            "target": advantages.target,
            "begins": rollout.is_first,
        }
        experience = {
            "transitions": {name: self._split_sequences(leaf) for name, leaf in transitions.items()},
            _MEMORY: jax.tree.map(lambda leaf: self._split_sequences(leaf)[:, :, 0], rollout.memory),
            "order": self._orders(order_key),
        }
        ended = rollout.terminated | rollout.truncated
        metrics: Metrics = {
            **acting.finished.metrics(),
            "episodes": Sum(ended.sum().astype(jnp.float32)),
            "explained_variance": Mean(explained_variance(rollout.value, advantages.target), jnp.float32(1.0)),
            "environment": check_rollout(rollout.reward, rollout.final_observation),
        }
        return CollectionResult(experience, {**new_state, **of_rewards}, {}, metrics)

    def _rewards(self, state: Mapping[str, Any], rollout: Rollout) -> tuple[Float[Array, "time environment"], Any]:
        """Return the rewards for the advantages, normalized if set, and the updated reward statistics."""
        if not self.normalize_rewards:
            return rollout.reward, {}

        def add(total: jax.Array, step: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
            total = self.discount * total + step[0]
            return jnp.where(step[1], 0.0, total), total

        ended = rollout.terminated | rollout.truncated
        discounted, returns = jax.lax.scan(add, state["discounted"], (rollout.reward, ended))
        statistics = state["returns"].update(returns)
        return statistics.scale(rollout.reward, _LIMIT), {"returns": statistics, "discounted": discounted}

    @property
    def _num_sequences(self) -> int:
        return self.steps // self.bptt_length

    def _split_sequences(
        self, leaf: Shaped[Array, "time environment ..."]
    ) -> Shaped[Array, "environment piece step ..."]:
        sequences = leaf.reshape(self._num_sequences, self.bptt_length, *leaf.shape[1:])
        return jnp.moveaxis(sequences, 2, 0)

    def _orders(self, key: jax.Array) -> Num[Array, "epoch environment piece"]:
        """Draw the order of the sequences for each pass and environment."""
        bits = jax.random.bits(key, (self.epochs, self.environments, self._num_sequences), jnp.uint32)
        return jnp.argsort(bits, axis=-1)

    def minibatch(self, experience: Any, state: Any, index: jax.Array, key: jax.Array) -> Batch:
        per_environment = self._num_sequences // self.minibatches
        order = jax.lax.dynamic_index_in_dim(experience["order"], index // self.minibatches, keepdims=False)
        chosen = jax.lax.dynamic_slice_in_dim(
            order, (index % self.minibatches) * per_environment, per_environment, axis=1
        )

        def take(leaf: Shaped[Array, "environment piece ..."]) -> Shaped[Array, "batch ..."]:
            sequences = jax.vmap(lambda row, indices: row[indices])(leaf, chosen)
            return sequences.reshape(-1, *leaf.shape[2:])

        batch = {name: take(leaf) for name, leaf in experience["transitions"].items()}
        for number, leaf in enumerate(jax.tree.leaves(experience[_MEMORY])):
            batch[f"{_MEMORY}{number}"] = take(leaf)
        if self.normalize_advantages:
            advantage = batch["advantage"]
            batch["advantage"] = (advantage - advantage.mean()) / (advantage.std() + 1e-8)
        return batch

    def should_continue(self, scalars: Mapping[str, Any]) -> jax.Array:
        assert self.target_kl is not None
        return scalars["divergence"] <= 1.5 * self.target_kl

    def loss_weights(self, params: Any, state: Any, micro_batches: Batch, key: jax.Array) -> Mapping[str, Scalar]:
        count = jnp.float32(micro_batches["advantage"].size)
        return dict.fromkeys(("policy", "value", *(("entropy",) if self.ent_coef else ())), count)

    def losses(self, params: PpoParameters, state: Any, batch: Batch, key: jax.Array) -> Evaluation:
        structure = jax.tree.structure(self.policy.initial_carry(1))
        # By index: sorted by name, memory10 would precede memory2.
        memory = structure.unflatten([batch[f"{_MEMORY}{number}"] for number in range(structure.num_leaves)])
        output = self.policy.unroll(params.policy, memory, batch["observation"], batch["begins"])
        numbers = self.actor(params, {}).distribution_params(output.distribution_params)
        family, sample = self.distribution, batch["sampled_action"]
        log_ratio = family.log_prob(numbers, sample) - batch["log_prob"]
        count = jnp.float32(log_ratio.size)
        policy = policy_loss(log_ratio, batch["advantage"], clip=self.clip, dual_clip=self.dual_clip)
        value = value_loss(
            output.value, batch["value"], batch["target"], clip=self.value_clip, form=self.value_clip_form
        )
        entropy = family.entropy(numbers, sample)
        losses: dict[str, Loss] = {
            "policy": Loss(policy.sum(), count),
            "value": Loss(value.sum(), count, self.vf_coef),
        }
        if self.ent_coef:
            losses["entropy"] = Loss(-entropy.sum(), count, self.ent_coef)
        metrics: Metrics = {
            "entropy": Mean(entropy.sum(), count),
            "divergence": Mean(approx_kl(log_ratio).sum(), count),
            "clipped": Mean(clip_indicator(log_ratio, self.clip).sum(), count),
        }
        return Evaluation(losses, state, metrics)

    def eval_policy(self, params: Any, state: Any, rows: int) -> tuple[Act, Any]:
        actor = self.actor(params, state)

        def act(memory: Any, observation: Num[Array, "batch ..."], keys: jax.Array) -> tuple[Any, Any]:
            memory, output = self.policy.act(actor.params, memory, actor.normalize_observation(observation))
            numbers = actor.distribution_params(output.distribution_params)
            sample = (
                actor.distribution.sample(numbers, keys) if self.stochastic_eval else actor.distribution.mode(numbers)
            )
            return memory, actor.distribution.action(sample)

        return act, self.policy.initial_carry(rows)
