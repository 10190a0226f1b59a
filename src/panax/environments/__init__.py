"""Environments for reinforcement learning: the protocol, its spaces, batches with automatic reset, and
built-in environments."""

from typing import TYPE_CHECKING

from ..core.lazy import lazy_getattr

if TYPE_CHECKING:
    from .acrobot import Acrobot
    from .batch import EnvironmentBatch, EnvironmentState, Transition
    from .cart_pole import CartPole
    from .checking import check_actions, check_environment
    from .environment import Action, Environment, EnvironmentStep, Frame
    from .grid_world import GridWorld
    from .of_brax import Brax
    from .of_gymnasium import Gymnasium
    from .of_gymnax import Gymnax
    from .pendulum import Pendulum
    from .spaces import Box, Discrete, Space

_WHERE = {
    "acrobot": ("Acrobot",),
    "batch": ("EnvironmentBatch", "EnvironmentState", "Transition"),
    "cart_pole": ("CartPole",),
    "checking": ("check_actions", "check_environment"),
    "environment": ("Action", "Environment", "Frame", "EnvironmentStep"),
    "grid_world": ("GridWorld",),
    "of_brax": ("Brax",),
    "of_gymnasium": ("Gymnasium",),
    "of_gymnax": ("Gymnax",),
    "pendulum": ("Pendulum",),
    "spaces": ("Box", "Discrete", "Space"),
}

__getattr__ = lazy_getattr(__name__, _WHERE)

__all__ = [
    "Acrobot", "Action", "Box", "Brax", "CartPole", "Discrete", "Environment", "EnvironmentBatch", "EnvironmentState",
    "EnvironmentStep", "Frame", "GridWorld", "Gymnasium", "Gymnax", "Pendulum", "Space", "Transition", "check_actions",
    "check_environment",
]  # fmt: skip
