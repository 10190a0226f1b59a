"""What every other room speaks in: tasks, modules, logical axes, named contraction, measures, state, errors."""

from typing import TYPE_CHECKING

from .lazy import lazily

if TYPE_CHECKING:
    from .axes import annotation_axes, map_axes, named_leaves, pair_axes, path_name
    from .bias import add_bias
    from .contraction import (
        contract,
        contract_whole,
        equal_shares,
        gather,
        opened_once,
        own_sequence,
        scatter_sequence,
        whole_sequence,
    )
    from .dropping import dropout, uniform
    from .errors import (
        CheckpointError,
        DamagedError,
        DataError,
        LayoutError,
        PanaxError,
        RecipeError,
        StoreError,
        TrainingError,
        nearest,
    )
    from .layout import Layout, current_layout, current_target, use_layout
    from .measures import Faults, Loss, Losses, Maximum, Mean, Metrics, Sum, merge_measures, total_loss
    from .module import Module, constant, logical_axes, name_key, normal, parameter, stack, stacked
    from .protocols import Axes, Batch, ModelState, Params, Position, Source, SourcedBatch
    from .scoping import current_scope, debugging, real_values, scope
    from .state import Guard, TrainState
    from .target import Target, Traits
    from .task import DataFacts, Evaluation, Gradients, Task

_WHERE = {
    "axes": ("annotation_axes", "map_axes", "named_leaves", "pair_axes", "path_name"),
    "bias": ("add_bias",),
    "contraction": (
        "contract",
        "contract_whole",
        "equal_shares",
        "gather",
        "opened_once",
        "own_sequence",
        "scatter_sequence",
        "whole_sequence",
    ),
    "dropping": ("dropout", "uniform"),
    "errors": (
        "CheckpointError",
        "DamagedError",
        "DataError",
        "LayoutError",
        "PanaxError",
        "RecipeError",
        "StoreError",
        "TrainingError",
        "nearest",
    ),
    "layout": ("Layout", "current_layout", "current_target", "use_layout"),
    "measures": ("Faults", "Loss", "Losses", "Maximum", "Mean", "Metrics", "Sum", "merge_measures", "total_loss"),
    "module": ("Module", "constant", "logical_axes", "name_key", "normal", "parameter", "stack", "stacked"),
    "protocols": ("Axes", "Batch", "ModelState", "Params", "Position", "Source", "SourcedBatch"),
    "scoping": ("current_scope", "debugging", "real_values", "scope"),
    "state": ("Guard", "TrainState"),
    "target": ("Target", "Traits"),
    "task": ("DataFacts", "Evaluation", "Gradients", "Task"),
}

__getattr__ = lazily(__name__, _WHERE)

__all__ = [
    "Axes", "Batch", "CheckpointError", "DamagedError", "DataError", "DataFacts", "Evaluation", "Faults", "Gradients", "Guard",
    "Layout", "LayoutError", "Loss", "Losses", "Maximum", "Mean", "Metrics", "ModelState", "Module", "PanaxError",
    "Params", "Position", "RecipeError", "Source", "SourcedBatch", "StoreError", "Sum", "Target", "Task", "TrainState",
    "TrainingError", "Traits", "add_bias", "annotation_axes", "constant", "contract", "contract_whole", "current_layout",
    "current_scope", "current_target", "debugging", "dropout", "equal_shares", "gather", "logical_axes", "map_axes",
    "merge_measures", "name_key", "named_leaves", "nearest", "normal", "opened_once", "own_sequence", "pair_axes",
    "parameter", "path_name", "real_values", "scatter_sequence", "scope", "stack", "stacked", "total_loss", "uniform",
    "use_layout", "whole_sequence",
]  # fmt: skip
