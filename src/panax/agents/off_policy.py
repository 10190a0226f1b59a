"""`OffPolicy`: the base of agents with a replay buffer: collection, sampling, target networks and
evaluation.
"""

import abc
import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int, Key, Num

from ..core import (
    Batch,
    CollectionResult,
    DataChecks,
    Mean,
    Metrics,
    Module,
    Params,
    Sum,
    logical_axes,
)
from ..core.errors import RecipeError
from ..core.measures import NO_FAULT, Scalar
from ..environments import Action, EnvironmentBatch
from ..environments.batch import step_keys
from .agent import Agent
from .episodes import Act, FinishedEpisodes
from .replay import Experience, Replay, check_memory, to_batch
from .rollouts import CHECKS, RolloutState, check_rollout

Explore = Callable[[Num[Array, "environment ..."], Key[Array, " environment"]], Num[Array, "environment ..."]]
"""Function from observations, and a key for each, to actions in the buffer's form."""

_DRAWS = 0xD4A35
"""Folded into a collection's key to derive the random bits of its updates."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class OffPolicy(Agent):
    """Base of off-policy agents: act for some steps, store them in a replay buffer, and update on sampled
    transitions.

    A minibatch has equally many transitions of every environment, so none leaves the device of its
    environment.

    Attributes:
        updates: Number of updates after each collection.
        batch_size: Transitions in an update; a multiple of `environments`.
        capacity: Capacity of the buffer in transitions of all environments; a multiple of `environments *
            steps`.
        warmup: Initial steps of each environment with uniformly random actions; a multiple of `steps`.
        discount: Discount factor per step (gamma).
        tau: Rate (tau) at which target networks move toward the trained ones.
        target_update_interval: Number of updates between two target updates.
    """

    rollouts_per_step: int = 64  # pyright: ignore[reportIncompatibleMethodOverride]
    updates: int = 1  # pyright: ignore[reportIncompatibleMethodOverride]
    batch_size: int = 256
    capacity: int = 131_072
    warmup: int = 128
    discount: float = 0.99
    tau: float = 0.005
    target_update_interval: int = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("updates", "batch_size", "capacity", "warmup", "target_update_interval"):
            if getattr(self, name) < 1:
                raise RecipeError(f"task.{name}={getattr(self, name)}; expected 1 or more")
        if not 0.0 <= self.discount <= 1.0:
            raise RecipeError(f"task.discount={self.discount}; expected a number in [0, 1]")
        if not 0.0 < self.tau <= 1.0:
            raise RecipeError(f"task.tau={self.tau}; expected a share in (0, 1]")
        for name, unit, of in (
            ("batch_size", self.environments, "environments"),
            ("capacity", self.environments * self.steps, "environments * steps"),
            ("warmup", self.steps, "steps"),
        ):
            if getattr(self, name) % unit:
                raise RecipeError(f"task.{name}={getattr(self, name)}; expected a multiple of {of} = {unit}")
        if self.warmup > self.capacity_per_environment:
            raise RecipeError(
                f"task.warmup={self.warmup} steps of {self.environments} environments are more than "
                f"task.capacity={self.capacity} transitions; expected at most {self.capacity_per_environment}"
            )

    @property
    def capacity_per_environment(self) -> int:
        """Return the capacity of the buffer per environment, in transitions."""
        return self.capacity // self.environments

    @abc.abstractmethod
    def networks(self, key: jax.Array) -> Module:
        """Initialize all trained parameters."""

    @abc.abstractmethod
    def target_network_source(self, params: Any) -> Any:
        """Return the part of the parameters that the target networks follow."""

    @property
    @abc.abstractmethod
    def stored_action(self) -> jax.ShapeDtypeStruct:
        """Return the shape and dtype of an action in the buffer."""

    @abc.abstractmethod
    def exploration_policy(self, params: Params, replay: Replay) -> Explore:
        """Return the exploration policy of collections."""

    @abc.abstractmethod
    def greedy_action(self, params: Params, observation: Num[Array, "batch ..."]) -> Num[Array, "batch ..."]:
        """Choose the actions of an evaluation, in the buffer's form."""

    def random_action(self, key: Key[Array, ""]) -> Num[Array, "..."]:
        """Sample a uniformly random action, in the buffer's form."""
        return self.environment.action_space.sample(key)

    def action(self, stored: Num[Array, "batch ..."]) -> Action:
        """Convert actions from the buffer's form to the environment's."""
        return stored

    def exploration_metrics(self, replay: Replay) -> Metrics:
        """Return the metrics of exploration."""
        return {}

    def init(self, key: jax.Array) -> tuple[Any, dict[str, Any]]:
        network_key, reset_key, warmup_key = jax.random.split(key, 3)
        params = self.networks(network_key)
        row = jnp.arange(self.environments, dtype=jnp.int32)
        begins, none = jnp.ones(self.environments, jnp.bool_), FinishedEpisodes.empty(self.environments)
        acting = RolloutState(EnvironmentBatch(self.environment).reset(reset_key, row), (), begins, none)

        def explore(observation: jax.Array, keys: jax.Array) -> jax.Array:
            return jax.vmap(self.random_action)(keys)

        acting, experience, _ = self._act(explore, acting, row, warmup_key, self.warmup)
        replay = Replay.create(
            self.environment.observation_space, self.stored_action, self.environments, self.capacity_per_environment
        ).add_first(experience)
        target = jax.tree.map(lambda leaf: jnp.array(leaf, copy=True), self.target_network_source(params))
        return params, {
            "acting": acting,
            "replay": replay,
            "faults": check_rollout(experience.reward, experience.next_observation).worst,
            "target": target,
            "updates_made": jnp.int32(0),
        }

    def check_memory(self, shardings: Any, runs: tuple[int, ...] = ()) -> None:
        _, state = jax.eval_shape(self.init, jax.random.key(0))
        check_memory(state["replay"], shardings["replay"], runs=runs)

    def state_axes(self, state: Any) -> Any:
        def by_environment(leaf: Any) -> tuple[str | None, ...]:
            return (("environment",) if leaf.ndim else ()) + (None,) * (leaf.ndim - 1)

        return {
            "acting": jax.tree.map(by_environment, state["acting"]),
            "replay": jax.tree.map(by_environment, state["replay"]),
            "faults": (None,),
            "target": logical_axes(state["target"]),
            "updates_made": (),
        }

    def collect(self, params: Any, state: Mapping[str, Any], batch: Batch, key: jax.Array) -> CollectionResult:
        explore = self.exploration_policy(params, state["replay"])
        acting, experience, ended = self._act(explore, state["acting"], batch["row"], key, self.steps)
        replay = state["replay"].add(experience)
        # Everything found once, also before the first step, stays in the buffer: no update is repeated.
        rollout_faults = check_rollout(experience.reward, experience.next_observation).worst
        worst = jnp.where(state["faults"] != NO_FAULT, state["faults"], rollout_faults)
        metrics: Metrics = {
            **acting.finished.metrics(),
            "episodes": Sum(ended.sum().astype(jnp.float32)),
            "transitions_kept": Mean(replay.size.astype(jnp.float32) * self.environments, jnp.float32(1.0)),
            **self.exploration_metrics(state["replay"]),
            "environment": DataChecks(worst, CHECKS),
        }
        update_state = {name: state[name] for name in ("target", "updates_made")}
        collection_state = {"acting": acting, "replay": replay, "faults": worst}
        return CollectionResult({"replay": replay, "row": batch["row"]}, collection_state, update_state, metrics)

    def minibatch(self, experience: Any, state: Any, index: jax.Array, key: jax.Array) -> Batch:
        minibatch_key = jax.random.fold_in(jax.random.fold_in(key, _DRAWS), index)
        replay: Replay = experience["replay"]
        return dict(to_batch(replay.sample(experience["row"], minibatch_key, self.batch_size // self.environments)))

    def update_state(self, params: Any, state: Any) -> Any:
        num_updates = state["updates_made"] + 1
        is_due = num_updates % self.target_update_interval == 0

        def toward(old: jax.Array, new: jax.Array) -> jax.Array:
            # In this order, a rate of 1 copies exactly.
            moved = (1.0 - self.tau) * old + self.tau * new.astype(old.dtype)
            return moved if self.target_update_interval == 1 else jnp.where(is_due, moved, old)

        target = jax.tree.map(toward, state["target"], self.target_network_source(params))
        return {**state, "target": target, "updates_made": num_updates}

    @property
    def loss_names(self) -> tuple[str, ...]:
        """Return the names of the losses that `losses` returns in training."""
        return ("value",)

    def loss_weights(self, params: Any, state: Any, micro_batches: Batch, key: jax.Array) -> Mapping[str, Scalar]:
        count: Scalar = jnp.float32(micro_batches["reward"].size)
        return dict.fromkeys(self.loss_names, count)

    def eval_policy(self, params: Any, state: Any, rows: int) -> tuple[Act, Any]:
        def act(memory: Any, observation: Num[Array, "batch ..."], keys: jax.Array) -> tuple[Any, Any]:
            return memory, self.action(self.greedy_action(params, observation))

        return act, ()

    def _act(
        self, explore: Explore, acting: RolloutState, row: Int[Array, " environment"], key: jax.Array, steps: int
    ) -> tuple[RolloutState, Experience, jax.Array]:
        """Take steps in each environment; return the transitions, (time, environment, ...), and which steps
        ended an episode."""
        batch = EnvironmentBatch(self.environment)

        def step(
            rollout_state: RolloutState, keys: tuple[Any, Any]
        ) -> tuple[RolloutState, tuple[Experience, jax.Array]]:
            act_keys, move_keys = keys
            stored = explore(rollout_state.ongoing.observation, act_keys)
            moved = batch.step_with_keys(rollout_state.ongoing, self.action(stored), move_keys)
            experience = Experience(
                rollout_state.ongoing.observation, stored, moved.reward, moved.terminated, moved.final_observation
            )
            return RolloutState(moved.environment_state, (), moved.ended, rollout_state.finished.update(moved)), (
                experience,
                moved.ended,
            )

        acting, (experience, ended) = jax.lax.scan(step, acting, step_keys(key, row, steps))
        return acting, experience, ended
