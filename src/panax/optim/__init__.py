"""Optimizers that update local shards and treat each layer's array separately; learning-rate schedules and
state sharding."""

from .decay import uses_weight_decay
from .elementwise.adafactor import Adafactor
from .elementwise.elementwise import AdamW, Lion, Sgd
from .elementwise.layerwise import Lamb, Lars
from .elementwise.schedule_free import ScheduleFreeAdamW
from .matrix.muon import Muon
from .matrix.shampoo import Shampoo
from .matrix.soap import Soap
from .optimizer import Chained, Optax, Optimizer
from .per_layer import apply_per_layer
from .rows.row_adagrad import RowAdagrad
from .rows.rows import LazyAdam, RowOptimizer, RowSgd, RowWiseAdagrad
from .schedule import CustomSchedule, Schedule
from .sharded.sharded_optimizer import ShardedOptimizer
from .state_axes import optimizer_state_axes
from .transformation import Transformation

__all__ = [
    "Adafactor", "AdamW", "Chained", "CustomSchedule", "Lamb", "Lars", "LazyAdam", "Lion", "Muon", "Optax",
    "Optimizer", "RowAdagrad", "RowOptimizer", "RowSgd", "RowWiseAdagrad", "Schedule", "ScheduleFreeAdamW", "Sgd",
    "Shampoo", "ShardedOptimizer", "Soap", "Transformation", "apply_per_layer", "optimizer_state_axes",
    "uses_weight_decay",
]  # fmt: skip
