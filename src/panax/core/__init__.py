"""Shared vocabulary of all packages: tasks, modules, logical axes, measures, state and errors."""

from typing import TYPE_CHECKING

from .lazy import lazily

if TYPE_CHECKING:
    from .collecting_task import Collected, CollectingTask
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
    from .layout.layout import Layout, current_layout, current_target, use_layout
    from .layout.target import Target, Traits
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
    from .monitors import HeatMap, MetricMonitor, Watched
    from .params.axes import annotation_axes, map_axes, named_leaves, pair_axes, path_name
    from .params.dropout import dropout, uniform
    from .params.logical import LogicalAxis, Role, Undivided, register_axes
    from .params.module import Module, constant, logical_axes, name_key, normal, parameter, stack, stacked
    from .params.scopes import current_scope, debugging, real_values, scope
    from .protocols import Axes, Batch, ModelState, Params, Position, Source, SourcedBatch
    from .serializable import register_serializable
    from .state import StepGuard, TrainState
    from .task import DataFacts, Evaluation, Gradients, Task

_WHERE = {
    "params.axes": ("annotation_axes", "map_axes", "named_leaves", "pair_axes", "path_name"),
    "collecting_task": ("Collected", "CollectingTask"),
    "params.dropout": ("dropout", "uniform"),
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
    "layout.layout": ("Layout", "current_layout", "current_target", "use_layout"),
    "params.logical": ("LogicalAxis", "Role", "Undivided", "register_axes"),
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
    "params.module": ("Module", "constant", "logical_axes", "name_key", "normal", "parameter", "stack", "stacked"),
    "protocols": ("Axes", "Batch", "ModelState", "Params", "Position", "Source", "SourcedBatch"),
    "serializable": ("register_serializable",),
    "params.scopes": ("current_scope", "debugging", "real_values", "scope"),
    "state": ("StepGuard", "TrainState"),
    "layout.target": ("Target", "Traits"),
    "task": ("DataFacts", "Evaluation", "Gradients", "Task"),
    "monitors": ("HeatMap", "MetricMonitor", "Watched"),
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
