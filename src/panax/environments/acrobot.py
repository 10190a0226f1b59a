"""`Acrobot`: two links with a motor between them that must swing the lower end up."""

import dataclasses
import math

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Key

from ..core.errors import RecipeError
from .canvas import BLUE, DARK, PALE, RED, blank_frame, fill_circle, fill_line
from .environment import Action, Environment, EnvironmentStep, Frame, Observation
from .pendulum import wrap_angle
from .spaces import Box, Discrete

_SECONDS = 0.2
_GRAVITY = 9.8
_CENTER = 0.5
_FASTEST = (4 * math.pi, 9 * math.pi)
_FIRST = 0.1


class AcrobotState(eqx.Module):
    """Two links in motion.

    Attributes:
        motion: The first link's angle from hanging down, the second one's from the first, both in [-π, π)
            (rad), and their velocities (rad/s).
        time: Steps taken.
    """

    motion: Float[Array, "4"]
    time: Int[Array, ""]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Acrobot(Environment):
    """A reward of -1 for each step until the lower end is a link's length above the axle.

    Equal to gymnasium's `Acrobot-v1`: links of 1 m and 1 kg, a torque of -1, 0 or 1 N m, integrated by the
    fourth-order Runge-Kutta method.

    Source: Sutton, Barto, Reinforcement learning: an introduction, section 11.3 (first edition).

    Attributes:
        max_steps: Number of steps after which an episode is truncated.
    """

    max_steps: int = 500

    def __post_init__(self) -> None:
        if self.max_steps < 1:
            raise RecipeError(f"Acrobot.max_steps={self.max_steps}; expected 1 or more")

    @property
    def observation_space(self) -> Box:
        high = (1.0, 1.0, 1.0, 1.0, *_FASTEST)
        return Box(low=tuple(-bound for bound in high), high=high, shape=(6,))

    @property
    def action_space(self) -> Discrete:
        return Discrete(count=3)

    @property
    def seconds_per_frame(self) -> float:
        return 1 / 15

    def reset(self, key: Key[Array, ""]) -> tuple[AcrobotState, Observation]:
        motion = jax.random.uniform(key, (4,), jnp.float32, -_FIRST, _FIRST)
        return AcrobotState(motion, jnp.int32(0)), _seen(motion)

    def step(self, state: AcrobotState, action: Action, key: Key[Array, ""]) -> EnvironmentStep:
        torque = action.astype(jnp.float32) - 1.0
        moved = _moved(state.motion, torque)
        fastest = jnp.array(_FASTEST, jnp.float32)
        motion = jnp.concatenate([jax.vmap(wrap_angle)(moved[:2]), jnp.clip(moved[2:], -fastest, fastest)])
        terminated = -jnp.cos(motion[0]) - jnp.cos(motion[1] + motion[0]) > 1.0
        time = state.time + 1
        reward = jnp.where(terminated, 0.0, -1.0).astype(jnp.float32)
        return EnvironmentStep(AcrobotState(motion, time), _seen(motion), reward, terminated, time >= self.max_steps)

    def render(self, state: AcrobotState) -> Frame:
        frame = blank_frame(128, 128)
        first, second = float(state.motion[0]), float(state.motion[0] + state.motion[1])
        middle = (64 + 28 * math.cos(first), 64 + 28 * math.sin(first))
        end = (middle[0] + 28 * math.cos(second), middle[1] + 28 * math.sin(second))
        fill_line(frame, (36, 0), (36, 128), 2, PALE)
        fill_line(frame, (64, 64), middle, 8, BLUE)
        fill_line(frame, middle, end, 8, RED)
        for joint in ((64, 64), middle):
            fill_circle(frame, joint, 4, DARK)
        return frame


def _moved(motion: Float[Array, "4"], torque: Float[Array, ""]) -> Float[Array, "4"]:
    """Integrate one step of the fourth-order Runge-Kutta method."""
    half = _SECONDS / 2
    first = _change(motion, torque)
    second = _change(motion + half * first, torque)
    third = _change(motion + half * second, torque)
    fourth = _change(motion + _SECONDS * third, torque)
    return motion + _SECONDS / 6.0 * (first + 2 * second + 2 * third + fourth)


def _change(motion: Float[Array, "4"], torque: Float[Array, ""]) -> Float[Array, "4"]:
    """Compute the time derivative of the motion, for links of 1 m, 1 kg and moments of inertia of 1 kg m²."""
    angle, bend, turning, bending = motion
    inertia = _CENTER**2 + (1 + _CENTER**2 + 2 * _CENTER * jnp.cos(bend)) + 2.0
    shared = _CENTER**2 + _CENTER * jnp.cos(bend) + 1.0
    lower = _CENTER * _GRAVITY * jnp.cos(angle + bend - math.pi / 2)
    upper = (
        -_CENTER * bending**2 * jnp.sin(bend)
        - 2 * _CENTER * bending * turning * jnp.sin(bend)
        + (_CENTER + 1) * _GRAVITY * jnp.cos(angle - math.pi / 2)
        + lower
    )
    bent = (torque + shared / inertia * upper - _CENTER * turning**2 * jnp.sin(bend) - lower) / (
        _CENTER**2 + 1.0 - shared**2 / inertia
    )
    acceleration = -(shared * bent + upper) / inertia
    return jnp.stack([turning, bending, acceleration, bent])


def _seen(motion: Float[Array, "4"]) -> Float[Array, "6"]:
    angle, bend, turning, bending = motion
    return jnp.stack([jnp.cos(angle), jnp.sin(angle), jnp.cos(bend), jnp.sin(bend), turning, bending])
