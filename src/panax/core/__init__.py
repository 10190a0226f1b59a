"""Shared vocabulary of all packages: tasks, modules, logical axes, measures, state and errors."""

from typing import TYPE_CHECKING

from .lazy import lazily

if TYPE_CHECKING:
    from .axes import annotation_axes, map_axes, named_leaves, pair_axes, path_name
    from .collecting import Collected, CollectingTask
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
    from .logical import LogicalAxis, Role, Undivided, register_axes
    from .measures import (
        DataChecks,
        Loss,
        Losses,
        Maximum,
        Mean,
        MeanWithInterval,
        Metrics,
        RocHistogram,
        Sum,
        merge_measures,
        total_loss,
    )
    from .module import Module, constant, logical_axes, name_key, normal, parameter, stack, stacked
    from .protocols import Axes, Batch, ModelState, Params, Position, Source, SourcedBatch
    from .readable import register_serializable
    from .scoping import current_scope, debugging, real_values, scope
    from .state import StepGuard, TrainState
    from .target import Target, Traits
    from .task import DataFacts, Evaluation, Gradients, Task
    from .watching import HeatMap, MetricMonitor, Watched

_WHERE = {
    "axes": ("annotation_axes", "map_axes", "named_leaves", "pair_axes", "path_name"),
    "collecting": ("Collected", "CollectingTask"),
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
    "logical": ("LogicalAxis", "Role", "Undivided", "register_axes"),
    "measures": (
        "DataChecks",
        "Loss",
        "Losses",
        "Maximum",
        "Mean",
        "Metrics",
        "RocHistogram",
        "MeanWithInterval",
        "Sum",
        "merge_measures",
        "total_loss",
    ),
    "module": ("Module", "constant", "logical_axes", "name_key", "normal", "parameter", "stack", "stacked"),
    "protocols": ("Axes", "Batch", "ModelState", "Params", "Position", "Source", "SourcedBatch"),
    "readable": ("register_serializable",),
    "scoping": ("current_scope", "debugging", "real_values", "scope"),
    "state": ("StepGuard", "TrainState"),
    "target": ("Target", "Traits"),
    "task": ("DataFacts", "Evaluation", "Gradients", "Task"),
    "watching": ("HeatMap", "MetricMonitor", "Watched"),
}

__getattr__ = lazily(__name__, _WHERE)

__all__ = [
    "Axes", "Batch", "CheckpointError", "Collected", "CollectingTask", "DamagedError", "DataChecks", "DataError",
    "DataFacts", "Evaluation", "Gradients", "HeatMap", "Layout", "LayoutError", "LogicalAxis", "Loss", "Losses", "Maximum",
    "Mean", "MeanWithInterval", "MetricMonitor", "Metrics", "ModelState", "Module", "PanaxError", "Params", "Position",
    "RecipeError", "RocHistogram", "Role", "Source", "SourcedBatch", "StepGuard", "StoreError", "Sum", "Target", "Task",
    "TrainState", "TrainingError", "Traits", "Undivided", "Watched", "annotation_axes", "constant", "current_layout",
    "current_scope", "current_target", "debugging", "dropout", "logical_axes", "map_axes", "merge_measures", "name_key",
    "named_leaves", "nearest", "normal", "pair_axes", "parameter", "path_name", "real_values", "register_axes",
    "register_serializable", "scope", "stack", "stacked", "total_loss", "uniform", "use_layout",
]  # fmt: skip
