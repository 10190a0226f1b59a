"""Environments with known best returns, and broken ones."""

import dataclasses

import equinox as eqx
import jax
import jax.numpy as jnp

from panax.environments import Box, Discrete, Environment, EnvironmentStep


class Time(eqx.Module):
    time: jax.Array
    cue: jax.Array


@dataclasses.dataclass(frozen=True, kw_only=True)
class Recall(Environment):
    """The first observation says which action is to be taken in the last of `steps` steps; those between carry no information."""

    steps: int = 4

    @property
    def observation_space(self) -> Box:
        return Box(low=-1.0, high=1.0, shape=(2,))

    @property
    def action_space(self) -> Discrete:
        return Discrete(count=2)

    def reset(self, key):
        cue = jax.random.bernoulli(key).astype(jnp.int32)
        return Time(jnp.int32(0), cue), jnp.stack([2.0 * cue.astype(jnp.float32) - 1.0, jnp.float32(0.0)])

    def step(self, state, action, key):
        time = state.time + 1
        last = time >= self.steps
        right = (action == state.cue).astype(jnp.float32)
        observation = jnp.stack([jnp.float32(0.0), (time == self.steps - 1).astype(jnp.float32)])
        return EnvironmentStep(Time(time, state.cue), observation, jnp.where(last, right, 0.0), last, jnp.bool_(False))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Copy(Environment):
    """The observation is two digits; the action that is right is their sum, and an episode is one step long."""

    digits: int = 3

    @property
    def observation_space(self) -> Box:
        return Box(low=0.0, high=self.digits - 1.0, shape=(2,), dtype="int32")

    @property
    def action_space(self) -> Discrete:
        return Discrete(count=2 * self.digits - 1)

    def reset(self, key):
        drawn = jax.random.randint(key, (2,), 0, self.digits, jnp.int32)
        return drawn, drawn

    def step(self, state, action, key):
        right = (action == state.sum()).astype(jnp.float32)
        return EnvironmentStep(state, state, right, jnp.bool_(True), jnp.bool_(False))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Endless(Environment):
    """A reward of 1 in each step, cut after `limit`: with a discount of 0.9 a state is worth 10, and with death less.

    `dies` says that the limit is one.
    """

    limit: int = 4
    dies: bool = False
    reward: float = 1.0

    @property
    def observation_space(self) -> Box:
        return Box(low=-1.0, high=1.0, shape=(1,))

    @property
    def action_space(self) -> Discrete:
        return Discrete(count=2)

    def reset(self, key):
        return jnp.int32(0), jnp.ones(1, jnp.float32)

    def step(self, state, action, key):
        over = state + 1 >= self.limit
        reward = jnp.float32(self.reward)
        return EnvironmentStep(state + 1, jnp.ones(1, jnp.float32), reward, over & self.dies, over & (not self.dies))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sick(Endless):
    """Its reward is NaN from the third step of an episode on."""

    def step(self, state, action, key):
        step = super().step(state, action, key)
        return step._replace(reward=jnp.where(state >= 2, jnp.nan, step.reward).astype(jnp.float32))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Growing(Endless):
    """Its state changes shape."""

    def step(self, state, action, key):
        return super().step(state, action, key)._replace(state=jnp.zeros(2, jnp.int32))
