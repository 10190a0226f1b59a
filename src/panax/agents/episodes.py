"""Whole episodes: evaluation of an agent, and statistics of episodes that end during training."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Key, Num

from ..core import Evaluation, Loss, Mean, MeanWithInterval, Metrics, Sum
from ..environments import Environment, EnvironmentBatch, Transition
from ..environments.batch import row_keys

Act = Callable[[Any, Num[Array, "batch ..."], Key[Array, " batch"]], tuple[Any, Num[Array, "batch ..."]]]
"""A policy: a function from (memory, observations, a key for each row) to the new memory and actions."""


class Episodes(NamedTuple):
    """One episode of each environment.

    Attributes:
        total: Sum of its rewards, not discounted.
        length: Its steps.
        finished: True if the episode ended.
    """

    total: Float[Array, " batch"]
    length: Int[Array, " batch"]
    finished: Bool[Array, " batch"]


class FinishedEpisodes(eqx.Module):
    """The last episode of each environment that ended in training.

    Attributes:
        total: Sum of its rewards, not discounted.
        length: Its steps.
        any: True if an episode has ended.
    """

    total: Float[Array, " environment"]
    length: Int[Array, " environment"]
    any: Bool[Array, " environment"]

    @classmethod
    def empty(cls, environments: int) -> "FinishedEpisodes":
        return cls(
            jnp.zeros(environments, jnp.float32), jnp.zeros(environments, jnp.int32), jnp.zeros(environments, jnp.bool_)
        )

    def update(self, transition: Transition) -> "FinishedEpisodes":
        """Return the statistics updated with the episodes that a step ended."""
        ended = transition.ended
        return FinishedEpisodes(
            jnp.where(ended, transition.episode_return, self.total),
            jnp.where(ended, transition.episode_length, self.length),
            self.any | ended,
        )

    def metrics(self) -> Metrics:
        """Compute the mean return and length over environments with an ended episode, and their number."""
        known = self.any.astype(jnp.float32)
        return {
            "episode_return": Mean((self.total * known).sum(), known.sum()),
            "episode_length": Mean((self.length.astype(jnp.float32) * known).sum(), known.sum()),
        }


def run_episodes(
    environment: Environment,
    act: Act,
    memory: Any,
    row: Int[Array, " batch"],
    key: Key[Array, ""],
    max_steps: int,
) -> Episodes:
    """Run one episode in each of several environments, until all have ended or for `max_steps` steps.

    Args:
        memory: The initial memory of `act`.
        row: The index of each environment.
    """
    batch = EnvironmentBatch(environment)
    reset_key, step_key = jax.random.split(key)

    def goes_on(carry: tuple[Any, ...]) -> jax.Array:
        number, _, _, _, episodes = carry
        return (number < max_steps) & ~episodes.finished.all()

    def step(carry: tuple[Any, ...]) -> tuple[Any, ...]:
        number, ongoing, memory, _, episodes = carry
        act_key, move_key = jax.random.split(jax.random.fold_in(step_key, number))
        memory, action = act(memory, ongoing.observation, row_keys(act_key, row))
        moved = batch.step(ongoing, action, move_key, row)
        playing = ~episodes.finished
        episodes = Episodes(
            episodes.total + jnp.where(playing, moved.reward, 0.0),
            episodes.length + playing.astype(jnp.int32),
            episodes.finished | moved.ended,
        )
        return number + 1, moved.environment_state, memory, moved.ended, episodes

    none = jnp.zeros(row.shape, jnp.bool_)
    nothing = Episodes(jnp.zeros(row.shape, jnp.float32), jnp.zeros(row.shape, jnp.int32), none)
    first = (jnp.int32(0), batch.reset(reset_key, row), memory, none, nothing)
    return jax.lax.while_loop(goes_on, step, first)[-1]


def evaluation_result(episodes: Episodes, state: Any) -> Evaluation:
    """Build the result of `Task.loss` for an evaluation; the loss is the negated mean return, so that less is
    better.

    `return` is reported with `return_std`, and with `return_ci95`, half the width of the mean's 95 %
    confidence interval. Unfinished episodes count with the return they have reached, and are counted in
    `unfinished`.
    """
    count = jnp.float32(episodes.total.size)
    metrics: Mapping[str, Any] = {
        "return": MeanWithInterval.of(episodes.total, jnp.ones_like(episodes.total)),
        "length": Mean(episodes.length.sum().astype(jnp.float32), count),
        "episodes": Sum(count),
        "unfinished": Sum((~episodes.finished).sum().astype(jnp.float32)),
    }
    return Evaluation({"negative_return": Loss(-episodes.total.sum(), count)}, state, metrics)
