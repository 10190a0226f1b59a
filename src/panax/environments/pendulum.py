"""`Pendulum`: a pendulum swung up and balanced by a motor too weak to lift it directly."""

import dataclasses
import math

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, Key

from ..core.errors import RecipeError
from .canvas import DARK, PALE, RED, blank_frame, fill_circle, fill_line
from .environment import Action, Environment, EnvironmentStep, Frame, Observation
from .spaces import Box

_SECONDS = 0.05
_GRAVITY, _MASS, _LENGTH = 10.0, 1.0, 1.0
_FASTEST, _STRONGEST = 8.0, 2.0


class PendulumState(eqx.Module):
    """A pendulum in motion.

    Attributes:
        angle: Angle from upright, in [-π, π) (rad).
        turning: Its velocity (rad/s).
        time: Steps taken.
    """

    angle: Float[Array, ""]
    turning: Float[Array, ""]
    time: Int[Array, ""]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Pendulum(Environment):
    """The reward of a step is minus a cost of the angle from upright, the velocity and the torque.

    Equal to gymnasium's `Pendulum-v1`. An episode never terminates; a time limit truncates it. A good mean
    return is -150.

    Attributes:
        max_steps: Number of steps after which an episode is truncated.
    """

    max_steps: int = 200

    def __post_init__(self) -> None:
        if self.max_steps < 1:
            raise RecipeError(f"Pendulum.max_steps={self.max_steps}; expected 1 or more")

    @property
    def observation_space(self) -> Box:
        return Box(low=(-1.0, -1.0, -_FASTEST), high=(1.0, 1.0, _FASTEST), shape=(3,))

    @property
    def action_space(self) -> Box:
        return Box(low=-_STRONGEST, high=_STRONGEST, shape=(1,))

    @property
    def seconds_per_frame(self) -> float:
        return _SECONDS

    def reset(self, key: Key[Array, ""]) -> tuple[PendulumState, Observation]:
        angle, turning = jax.random.uniform(key, (2,), jnp.float32, -1.0, 1.0) * jnp.array([math.pi, 1.0], jnp.float32)
        state = PendulumState(angle, turning, jnp.int32(0))
        return state, _seen(state)

    def step(self, state: PendulumState, action: Action, key: Key[Array, ""]) -> EnvironmentStep:
        torque = jnp.clip(action[0], -_STRONGEST, _STRONGEST)
        cost = wrap_angle(state.angle) ** 2 + 0.1 * state.turning**2 + 0.001 * torque**2
        pull = 3 * _GRAVITY / (2 * _LENGTH) * jnp.sin(state.angle) + 3.0 / (_MASS * _LENGTH**2) * torque
        turning = jnp.clip(state.turning + pull * _SECONDS, -_FASTEST, _FASTEST)
        after = PendulumState(wrap_angle(state.angle + turning * _SECONDS), turning, state.time + 1)
        return EnvironmentStep(after, _seen(after), -cost, jnp.bool_(False), after.time >= self.max_steps)

    def render(self, state: PendulumState) -> Frame:
        frame = blank_frame(128, 128)
        angle = float(state.angle)
        end = (64 - 50 * math.cos(angle), 64 - 50 * math.sin(angle))
        fill_line(frame, (64, 64), end, 10, RED)
        fill_circle(frame, (64, 64), 4, DARK)
        fill_line(frame, (124, 64), (124, 64 + 56 * float(np.clip(state.turning / _FASTEST, -1, 1))), 4, PALE)
        return frame


def wrap_angle(angle: Float[Array, ""]) -> Float[Array, ""]:
    """Wrap an angle to [-π, π)."""
    return jnp.mod(angle + math.pi, 2 * math.pi) - math.pi


def _seen(state: PendulumState) -> Float[Array, "3"]:
    return jnp.stack([jnp.cos(state.angle), jnp.sin(state.angle), state.turning])
