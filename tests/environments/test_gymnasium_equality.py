"""Our environments equal gymnasium's in each of 1,000 single steps from gymnasium's own state.

Both are given the same state and action. What ends an episode is a comparison with a limit: where gymnasium's state, in float64,
lies within 1e-5 of one, float32 may fall on the other side, and there the two may differ.
"""

import gymnasium
import jax
import numpy as np
import pytest

from panax.environments import Acrobot, CartPole, Pendulum
from panax.environments.acrobot import AcrobotState
from panax.environments.cart_pole import CartPoleState
from panax.environments.pendulum import PendulumState

TOLERANCE = 1e-5
STEPS = 1000


def wrapped(angle: np.ndarray) -> np.ndarray:
    return (angle + np.pi) % (2 * np.pi) - np.pi


def walk(name: str, draw_action, least_seed: int = 0) -> dict[str, np.ndarray]:
    """1,000 steps of gymnasium's environment, each with the state before and after it in float64."""
    environment = gymnasium.make(name)
    inner = environment.unwrapped
    generator = np.random.default_rng(0)
    rows: list[tuple] = []
    environment.reset(seed=least_seed)
    time = 0
    while len(rows) < STEPS:
        before, action = np.array(inner.state, np.float64), draw_action(generator, inner)
        observation, reward, terminated, truncated, _ = environment.step(action)
        rows.append(
            (before, action, time, np.array(inner.state, np.float64), observation, reward, terminated, truncated)
        )
        time += 1
        if terminated or truncated:
            environment.reset(seed=least_seed + len(rows))
            time = 0
    environment.close()
    names = ("before", "action", "time", "after", "observation", "reward", "terminated", "truncated")
    return {name: np.array([row[place] for row in rows]) for place, name in enumerate(names)}


def stepped(environment, state, walked: dict[str, np.ndarray], *motion: np.ndarray):
    """One step of ours from each of gymnasium's states, of which `state` makes ours."""

    def step(action, time, *motion):
        return environment.step(state(*motion, time), action, jax.random.key(0))

    action = walked["action"].astype(np.float32 if walked["action"].ndim == 2 else np.int32)
    return jax.jit(jax.vmap(step))(
        action, walked["time"].astype(np.int32), *(each.astype(np.float32) for each in motion)
    )


def check(walked: dict[str, np.ndarray], ours, away_from_limits: np.ndarray) -> None:
    # 1e-5 absolutely, and of numbers above 1, as velocities of 28 rad/s, 1e-5 of their size.
    close = {"rtol": TOLERANCE, "atol": TOLERANCE}
    np.testing.assert_allclose(ours.observation, walked["observation"], **close)
    assert away_from_limits.sum() > 0.99 * STEPS
    np.testing.assert_array_equal(ours.terminated[away_from_limits], walked["terminated"][away_from_limits])
    np.testing.assert_allclose(ours.reward[away_from_limits], walked["reward"][away_from_limits], **close)
    np.testing.assert_array_equal(ours.truncated, walked["truncated"])


def test_cart_pole():
    # Pushed towards where the pole leans it stands long; some random pushes let it fall.
    walked = walk(
        "CartPole-v1",
        lambda generator, inner: (
            int(inner.state[2] + inner.state[3] > 0) if generator.random() < 0.7 else int(generator.integers(2))
        ),
    )
    ours = stepped(CartPole(), CartPoleState, walked, walked["before"])
    position, angle = np.abs(walked["after"][:, 0]), np.abs(walked["after"][:, 2])
    away = (np.abs(position - 2.4) > TOLERANCE) & (np.abs(angle - 12 * 2 * np.pi / 360) > TOLERANCE)
    assert walked["terminated"].sum() >= 3
    np.testing.assert_allclose(ours.state.motion, walked["after"], rtol=TOLERANCE, atol=TOLERANCE)
    check(walked, ours, away)


def test_pendulum():
    walked = walk("Pendulum-v1", lambda generator, inner: generator.uniform(-2.5, 2.5, 1).astype(np.float32))
    angle, turning = wrapped(walked["before"][:, 0]), walked["before"][:, 1]
    ours = stepped(Pendulum(), PendulumState, walked, angle, turning)
    assert walked["truncated"].sum() == 5
    apart = wrapped(np.asarray(ours.state.angle) - walked["after"][:, 0])
    np.testing.assert_allclose(apart, 0.0, atol=TOLERANCE)
    np.testing.assert_allclose(ours.state.turning, walked["after"][:, 1], rtol=TOLERANCE, atol=TOLERANCE)
    check(walked, ours, np.ones(STEPS, bool))


def test_acrobot():
    # A torque in the direction of the lower link's motion adds energy: episodes terminate.
    walked = walk(
        "Acrobot-v1",
        lambda generator, inner: (
            int(np.sign(inner.state[3])) + 1 if generator.random() < 0.8 else int(generator.integers(3))
        ),
    )
    ours = stepped(Acrobot(), AcrobotState, walked, walked["before"])
    angle, bend = walked["after"][:, 0], walked["after"][:, 1]
    away = np.abs(-np.cos(angle) - np.cos(angle + bend) - 1.0) > TOLERANCE
    assert walked["terminated"].sum() >= 3
    apart = wrapped(np.asarray(ours.state.motion, np.float64)[:, :2] - walked["after"][:, :2])
    np.testing.assert_allclose(apart, 0.0, atol=TOLERANCE)
    np.testing.assert_allclose(ours.state.motion[:, 2:], walked["after"][:, 2:], rtol=TOLERANCE, atol=TOLERANCE)
    check(walked, ours, away)


@pytest.mark.parametrize(
    ("ours", "name"), [(CartPole(), "CartPole-v1"), (Pendulum(), "Pendulum-v1"), (Acrobot(), "Acrobot-v1")]
)
def test_spaces_and_first_states(ours, name):
    theirs = gymnasium.make(name)
    assert ours.max_steps == theirs.spec.max_episode_steps
    seen, acted = theirs.observation_space, theirs.action_space
    np.testing.assert_array_equal(ours.observation_space.lower.astype(np.float32), seen.low)
    np.testing.assert_array_equal(ours.observation_space.upper.astype(np.float32), seen.high)
    if name == "Pendulum-v1":
        assert ours.action_space.shape == acted.shape and ours.action_space.high == acted.high[0]
    else:
        assert ours.action_space.count == acted.n
    drawn = jax.vmap(lambda key: ours.reset(key)[1])(jax.random.split(jax.random.key(0), 512))
    first = np.stack([theirs.reset(seed=seed)[0] for seed in range(512)])
    theirs.close()
    # Both are even between the same bounds: 512 of them reach within a few parts of either end.
    np.testing.assert_allclose(np.min(drawn, axis=0), first.min(axis=0), atol=0.05)
    np.testing.assert_allclose(np.max(drawn, axis=0), first.max(axis=0), atol=0.05)
