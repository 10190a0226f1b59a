"""Each mistake that an environment can make has one clear message; ours make none."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from panax.core import RecipeError
from panax.environments import (
    Acrobot,
    Box,
    CartPole,
    Discrete,
    Environment,
    EnvironmentStep,
    GridWorld,
    Pendulum,
    check_actions,
    check_environment,
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Counting(Environment):
    """Counts to 4, and makes the mistake that it is asked for."""

    mistake: str = ""

    @property
    def observation_space(self) -> Box:
        if self.mistake == "wrong space":
            return (0, 1)  # pyright: ignore[reportReturnType]
        return Box(low=0.0, high=3.0 if self.mistake == "out of range" else 8.0, shape=(2,))

    @property
    def action_space(self) -> Discrete:
        return Discrete(count=3)

    def reset(self, key):
        count = jnp.zeros((), jnp.int32)
        return {"count": count}, self._seen(count)[:1] if self.mistake == "short observation" else self._seen(count)

    def step(self, state, action, key):
        count = state["count"] + 1
        bad = jnp.where(count == 3, jnp.nan, 1.0)
        after = {"count": count}
        if self.mistake == "state of another shape":
            after = {"count": count[None]}
        if self.mistake == "state of another structure":
            after = {"count": count, "more": count}
        seen, reward = self._seen(count), jnp.float32(1.0)
        if self.mistake == "NaN observed":
            seen = seen * bad
        if self.mistake == "NaN reward":
            reward = reward * bad
        if self.mistake == "whole reward":
            reward = jnp.int32(1)
        if self.mistake == "four values":
            return after, seen, reward, count >= 4
        terminated = count >= 4
        if self.mistake == "flag":
            terminated = terminated.astype(jnp.float32)
        if self.mistake == "raises":
            raise ValueError("no such action")
        return EnvironmentStep(after, seen, reward, terminated, jnp.bool_(False))

    def _seen(self, count):
        return jnp.stack([count, count]).astype(jnp.float64 if self.mistake == "dtype" else jnp.float32)


@pytest.mark.parametrize(
    "environment", [CartPole(), Pendulum(), Acrobot(), GridWorld(), GridWorld(observation="picture"), Counting()]
)
def test_what_keeps_the_contract_passes(environment):
    check_environment(environment)


@pytest.mark.parametrize(
    ("mistake", "message"),
    [
        ("wrong space", r"Counting\.observation_space is a tuple; expected a Box or a Discrete"),
        ("short observation", r"Counting\.reset: observation is float32\[1\]; expected float32\[2\]"),
        (
            "state of another shape",
            r"changes the state's leaf count from int32\[\] to int32\[1\]; expected the same shape",
        ),
        ("state of another structure", r"changes the state's structure"),
        ("whole reward", r"Counting\.step: reward is int32\[\]; expected float32\[\]"),
        ("flag", r"Counting\.step: terminated is float32\[\]; expected bool\[\]"),
        (
            "four values",
            r"returned 4 values; expected EnvironmentStep\(state, observation, reward, terminated, truncated\)",
        ),
        ("raises", r"can't be traced with an action of Discrete\(count=3\): no such action"),
        ("NaN observed", r"returned an observation with NaN in step 3, for the action \d; expected numbers of Box"),
        ("NaN reward", r"gave the reward nan in step 3, for the action \d; expected a finite number"),
        (
            "out of range",
            r"gave the observation \[4\. 4\.\] in step 4.*element \[0\] is 4\.0, outside its space's \[0, 3\]",
        ),
    ],
)
def test_each_mistake_has_one_message(mistake, message):
    with pytest.raises(RecipeError, match=message) as raised:
        check_environment(Counting(mistake=mistake))
    assert "\n" not in str(raised.value)


def test_actions_out_of_range_are_named():
    check_actions(Discrete(count=2), np.array([0, 1]))
    with pytest.raises(
        RecipeError, match=r"action 2 of environment 1 is out of range for CartPole; expected Discrete\(count=2\)"
    ):
        check_actions(Discrete(count=2), np.array([0, 2]), "CartPole")
    with pytest.raises(RecipeError, match=r"shape \(2, 1\) and dtype int64; expected \(2,\) and int32"):
        check_actions(Discrete(count=2), np.array([[0], [1]]))
    box = Box(low=-2.0, high=2.0, shape=(1,))
    with pytest.raises(RecipeError, match=r"action \[2.5\] of environment 0 is out of range"):
        check_actions(box, np.array([[2.5]], np.float32))
    with pytest.raises(RecipeError, match="action \\[nan\\] of environment 0"):
        check_actions(box, np.array([[np.nan]], np.float32))


@pytest.mark.parametrize(
    "space",
    [
        Discrete(count=5),
        Box(low=-2.0, high=(1.0, np.inf), shape=(2,)),
        Box(low=0.0, high=255.0, shape=(3, 2), dtype="uint8"),
        Box(low=-1.0, high=1.0, shape=(2,), dtype="int32"),
        Box(low=0.0, high=1.0, shape=(2,), dtype="bool"),
    ],
)
def test_what_a_space_draws_lies_in_it(space):
    drawn = jax.vmap(space.sample)(jax.random.split(jax.random.key(0), 300))
    assert drawn.shape[1:] == space.abstract.shape and drawn.dtype == space.abstract.dtype
    assert bool(jax.vmap(space.contains)(drawn).all())
    if drawn.dtype.kind in "iu" and space != Box(low=0.0, high=255.0, shape=(3, 2), dtype="uint8"):
        low = 0 if isinstance(space, Discrete) else -1
        assert np.unique(drawn).tolist() == list(range(low, 5 if isinstance(space, Discrete) else 2))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"low": 1.0, "high": 0.0}, "no lower bound above"),
        ({"low": (0.0,), "high": 1.0, "shape": (2,)}, "1 bounds for the shape"),
        ({"low": 0.0, "high": 1.0, "shape": (0,)}, "sizes of 1 or more"),
    ],
)
def test_a_box_that_is_none_is_refused(settings, message):
    with pytest.raises(RecipeError, match=message):
        Box(**settings)
