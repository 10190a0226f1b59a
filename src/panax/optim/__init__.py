"""Optimizers as optax chains over each layer's own arrays, schedules, and where optimizer state lies."""

from .decay import decays
from .optimizers import Adafactor, AdamW, Optax, Optimizer, Sgd
from .per_layer import on_each_layer
from .schedule import OwnSchedule, Schedule
from .state_axes import optimizer_state_axes

__all__ = [
    "Adafactor", "AdamW", "Optax", "Optimizer", "OwnSchedule", "Schedule", "Sgd", "decays", "on_each_layer",
    "optimizer_state_axes",
]  # fmt: skip
