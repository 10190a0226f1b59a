"""Environments for reinforcement learning: the protocol, its spaces, batches with automatic reset, and our own environments."""

from typing import TYPE_CHECKING

from ..core.lazy import lazily

if TYPE_CHECKING:
    from .acrobot import Acrobot
    from .batch import EnvironmentBatch, Ongoing, Transition, batch_axes
    from .cart_pole import CartPole
    from .checking import check_actions, check_environment
    from .environment import Environment, Frame, Step
    from .grid_world import GridWorld
    from .pendulum import Pendulum
    from .spaces import Box, Discrete, Space

_WHERE = {
    "acrobot": ("Acrobot",),
    "batch": ("EnvironmentBatch", "Ongoing", "Transition", "batch_axes"),
    "cart_pole": ("CartPole",),
    "checking": ("check_actions", "check_environment"),
    "environment": ("Environment", "Frame", "Step"),
    "grid_world": ("GridWorld",),
    "pendulum": ("Pendulum",),
    "spaces": ("Box", "Discrete", "Space"),
}

__getattr__ = lazily(__name__, _WHERE)

__all__ = [
    "Acrobot", "Box", "CartPole", "Discrete", "Environment", "EnvironmentBatch", "Frame", "GridWorld", "Ongoing", "Pendulum",
    "Space", "Step", "Transition", "batch_axes", "check_actions", "check_environment",
]  # fmt: skip
