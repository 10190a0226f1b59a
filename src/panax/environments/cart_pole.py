"""`CartPole`: a pole on a cart, balanced by pushing the cart to the left or to the right."""

import dataclasses
import math

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Key

from ..core.errors import RecipeError
from .canvas import BLUE, DARK, PALE, RED, blank_frame, fill_circle, fill_line, fill_rectangle
from .environment import Action, Environment, EnvironmentStep, Frame, Observation
from .spaces import Box, Discrete

_GRAVITY = 9.8
_CART_MASS, _POLE_MASS = 1.0, 0.1
_MASS = _CART_MASS + _POLE_MASS
_HALF_LENGTH = 0.5
_FORCE = 10.0
_SECONDS = 0.02
_FURTHEST, _STEEPEST = 2.4, 12 * 2 * math.pi / 360
_FIRST = 0.05


class CartPoleState(eqx.Module):
    """A cart with its pole.

    Attributes:
        motion: The cart's position (m) and velocity (m/s), the pole's angle from upright (rad) and its
            velocity (rad/s).
        time: Steps taken.
    """

    motion: Float[Array, "4"]
    time: Int[Array, ""]


@dataclasses.dataclass(frozen=True, kw_only=True)
class CartPole(Environment):
    """A reward of 1 for each step until the pole has fallen 12 degrees or the cart has left the track.

    Equal to gymnasium's `CartPole-v1`, with the same returns: 500 is the best.

    Source: Barto, Sutton, Anderson, Neuronlike adaptive elements that can solve difficult learning control
    problems (1983).

    Attributes:
        max_steps: Number of steps after which an episode is truncated.
    """

    max_steps: int = 500

    def __post_init__(self) -> None:
        if self.max_steps < 1:
            raise RecipeError(f"CartPole.max_steps={self.max_steps}; expected 1 or more")

    @property
    def observation_space(self) -> Box:
        high = (2 * _FURTHEST, math.inf, 2 * _STEEPEST, math.inf)
        return Box(low=tuple(-bound for bound in high), high=high, shape=(4,))

    @property
    def action_space(self) -> Discrete:
        return Discrete(count=2)

    @property
    def seconds_per_frame(self) -> float:
        return _SECONDS

    def reset(self, key: Key[Array, ""]) -> tuple[CartPoleState, Observation]:
        motion = jax.random.uniform(key, (4,), jnp.float32, -_FIRST, _FIRST)
        return CartPoleState(motion, jnp.int32(0)), motion

    def step(self, state: CartPoleState, action: Action, key: Key[Array, ""]) -> EnvironmentStep:
        _, velocity, angle, turning = state.motion
        force = jnp.where(action == 1, _FORCE, -_FORCE)
        cosine, sine = jnp.cos(angle), jnp.sin(angle)
        pushed = (force + _POLE_MASS * _HALF_LENGTH * turning * turning * sine) / _MASS
        angular = (_GRAVITY * sine - cosine * pushed) / (
            _HALF_LENGTH * (4.0 / 3.0 - _POLE_MASS * cosine * cosine / _MASS)
        )
        linear = pushed - _POLE_MASS * _HALF_LENGTH * angular * cosine / _MASS
        # Euler's method: positions change by the velocities before the step.
        motion = state.motion + _SECONDS * jnp.stack([velocity, linear, turning, angular])
        time = state.time + 1
        terminated = (jnp.abs(motion[0]) > _FURTHEST) | (jnp.abs(motion[2]) > _STEEPEST)
        return EnvironmentStep(
            CartPoleState(motion, time), motion, jnp.float32(1.0), terminated, time >= self.max_steps
        )

    def render(self, state: CartPoleState) -> Frame:
        frame = blank_frame(96, 192)
        column, angle = 96 + 36 * float(state.motion[0]), float(state.motion[2])
        fill_line(frame, (76, 0), (76, 192), 2, PALE)
        fill_rectangle(frame, (66, column - 14), (80, column + 14), DARK)
        fill_line(frame, (66, column), (66 - 50 * math.cos(angle), column + 50 * math.sin(angle)), 6, RED)
        fill_circle(frame, (66, column), 3, BLUE)
        return frame
