"""Optimizers that update local shards and treat each layer's array separately; learning-rate schedules and
state sharding."""

from .adafactor import Adafactor
from .decay import uses_weight_decay
from .elementwise import AdamW, Lion, Sgd
from .layerwise import Lamb, Lars
from .muon import Muon
from .on_shards import ShardedOptimizer
from .optimizer import Chained, Optax, Optimizer
from .per_layer import on_each_layer
from .row_adagrad import RowAdagrad
from .rows import LazyAdam, RowOptimizer, RowSgd, RowWiseAdagrad
from .schedule import OwnSchedule, Schedule
from .schedule_free import ScheduleFreeAdamW
from .shampoo import Shampoo
from .soap import Soap
from .state_axes import optimizer_state_axes
from .transformation import Transformation

__all__ = [
    "Adafactor", "AdamW", "Chained", "Lamb", "Lars", "LazyAdam", "Lion", "Muon", "Optax", "Optimizer", "OwnSchedule",
    "RowAdagrad", "RowOptimizer", "RowSgd", "RowWiseAdagrad", "Schedule", "ScheduleFreeAdamW", "Sgd", "Shampoo",
    "ShardedOptimizer", "Soap", "Transformation", "on_each_layer", "optimizer_state_axes", "uses_weight_decay",
]  # fmt: skip
