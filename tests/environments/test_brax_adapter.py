"""Brax's environments by the protocol, on a stand-in with Brax's interface: Brax itself is large, and tests don't install it."""

import sys
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import struct

from panax.core import RecipeError
from panax.environments import Brax, EnvironmentBatch, check_environment


@struct.dataclass
class State:
    """As `brax.envs.base.State`."""

    pipeline_state: dict
    obs: jax.Array
    reward: jax.Array
    done: jax.Array
    metrics: dict
    info: dict


class Sliding:
    """A body that is pushed along a line, and is done outside of it."""

    observation_size, action_size = 2, 1

    def __init__(self, backend: str = "spring"):
        if backend not in ("spring", "mjx"):
            raise ValueError(f"backend {backend}")

    def reset(self, rng):
        place = jax.random.uniform(rng, (2,), jnp.float32, -0.1, 0.1)
        zero = jnp.zeros((), jnp.float32)
        return State({"q": place}, place, zero, zero, {"distance": zero}, {"rng": rng})

    def step(self, state, action):
        place = state.pipeline_state["q"] + jnp.stack([state.pipeline_state["q"][1], action[0]])
        done = (jnp.abs(place[0]) > 2.0).astype(jnp.float32)
        state.metrics.update(distance=0.0)  # As some of Brax's own do: in place, and with a Python number.
        return state.replace(pipeline_state={"q": place}, obs=place, reward=1.0 - jnp.abs(place[0]), done=done)


class Several(Sliding):
    observation_size = {"state": (3,), "pixels": (4, 4)}  # noqa: RUF012


@pytest.fixture(autouse=True)
def stand_in(monkeypatch):
    envs = types.ModuleType("brax.envs")
    envs._envs = {"sliding": Sliding, "several": Several}  # pyright: ignore[reportAttributeAccessIssue]
    envs.get_environment = lambda name, **options: envs._envs[name](**options)  # pyright: ignore[reportAttributeAccessIssue]
    monkeypatch.setitem(sys.modules, "brax", types.ModuleType("brax"))
    monkeypatch.setitem(sys.modules, "brax.envs", envs)


def test_done_terminates_and_the_limit_truncates():
    batch = EnvironmentBatch(Brax(name="sliding", max_steps=5))
    ongoing = batch.reset(jax.random.key(0), jnp.arange(2))
    step = jax.jit(batch.step)
    flags = []
    for number in range(5):
        after = step(ongoing, jnp.array([[1.0], [0.0]], jnp.float32), jax.random.key(number), jnp.arange(2))
        ongoing = after.environment_state
        flags.append((after.terminated.tolist(), after.truncated.tolist()))
    assert flags[2] == ([True, False], [False, False])
    assert flags[4] == ([False, False], [False, True])
    assert ongoing.state.inner.info["rng"].dtype == jnp.uint32


def test_it_keeps_the_contract():
    environment = Brax(name="sliding", options={"backend": "mjx"}, max_steps=10)
    check_environment(environment, steps=12)
    assert environment.observation_space.shape == (2,) and np.isinf(environment.observation_space.high)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"name": "slidin"}, "did you mean 'sliding'"),
        ({"name": "sliding", "options": {"backend": "none"}}, "don't build sliding: backend none"),
        ({"name": "several"}, "observed by several arrays"),
        ({"name": "sliding", "max_steps": 0}, "max_steps=0"),
    ],
)
def test_what_is_not_there_is_refused(settings, message):
    with pytest.raises(RecipeError, match=message):
        Brax(**settings)
