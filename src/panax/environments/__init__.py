"""Environments for reinforcement learning: the protocol, its spaces, batches with automatic reset, and our own environments."""

from typing import TYPE_CHECKING

from ..core.lazy import lazily

if TYPE_CHECKING:
    from .batch import EnvironmentBatch, Ongoing, Transition, batch_axes
    from .cart_pole import CartPole
    from .environment import Environment, Frame, Step
    from .spaces import Box, Discrete, Space

_WHERE = {
    "batch": ("EnvironmentBatch", "Ongoing", "Transition", "batch_axes"),
    "cart_pole": ("CartPole",),
    "environment": ("Environment", "Frame", "Step"),
    "spaces": ("Box", "Discrete", "Space"),
}

__getattr__ = lazily(__name__, _WHERE)

__all__ = [
    "Box", "CartPole", "Discrete", "Environment", "EnvironmentBatch", "Frame", "Ongoing", "Space", "Step", "Transition",
    "batch_axes",
]  # fmt: skip
