"""Environments for reinforcement learning: the protocol, its spaces, batches with automatic reset, and
built-in environments."""

from typing import TYPE_CHECKING

from ..core.lazy import lazy_getattr

if TYPE_CHECKING:
    from .acrobot import Acrobot
    from .batch import EnvironmentBatch, EnvironmentState, Transition
    from .brax_adapter import Brax
    from .cart_pole import CartPole
    from .contract_check import check_actions, check_environment
    from .environment import Action, Environment, EnvironmentStep, Frame
    from .grid_world import GridWorld
    from .gymnasium_adapter import Gymnasium
    from .gymnax_adapter import Gymnax
    from .pendulum import Pendulum
    from .spaces import Box, Discrete, Space

_WHERE = {
    "acrobot": ("Acrobot",),
    "batch": ("EnvironmentBatch", "EnvironmentState", "Transition"),
    "cart_pole": ("CartPole",),
    "contract_check": ("check_actions", "check_environment"),
    "environment": ("Action", "Environment", "Frame", "EnvironmentStep"),
    "grid_world": ("GridWorld",),
    "brax_adapter": ("Brax",),
    "gymnasium_adapter": ("Gymnasium",),
    "gymnax_adapter": ("Gymnax",),
    "pendulum": ("Pendulum",),
    "spaces": ("Box", "Discrete", "Space"),
}

__getattr__ = lazy_getattr(__name__, _WHERE)

__all__ = [
    "Acrobot", "Action", "Box", "Brax", "CartPole", "Discrete", "Environment", "EnvironmentBatch", "EnvironmentState",
    "EnvironmentStep", "Frame", "GridWorld", "Gymnasium", "Gymnax", "Pendulum", "Space", "Transition", "check_actions",
    "check_environment",
]  # fmt: skip
