"""Shared vocabulary of all packages: tasks, modules, logical axes, measures, state and errors."""

from typing import TYPE_CHECKING

from .lazy import lazy_getattr

if TYPE_CHECKING:
    from .collecting_task import CollectingTask, CollectionResult
    from .errors import (
        CheckpointError,
        DamagedError,
        DataError,
        LayoutError,
        PanaxError,
        RecipeError,
        StoreError,
        TrainingError,
        suggest_name,
    )
    from .layout.layout import Layout, current_layout, current_target, use_layout
    from .layout.target import PlatformTraits, Target
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
    from .monitors import HeatMap, MetricMonitor, MonitorReport
    from .params.axes import annotation_axes, map_axes, named_leaves, pair_axes, path_name
    from .params.dropout import dropout, uniform
    from .params.logical import DivisibilityPolicy, LogicalAxis, Role, register_axes
    from .params.module import Module, constant, logical_axes, name_key, normal, parameter, stack, stacked_modules
    from .params.scopes import current_scope, is_debugging, scope, use_eager_values
    from .protocols import Axes, Batch, IncrementalModel, ModelState, Params, Position, Source, SourcedBatch
    from .serializable import register_serializable
    from .state import StepGuard, TrainState
    from .task import DataFacts, Evaluation, Gradients, Task

_WHERE = {
    "params.axes": ("annotation_axes", "map_axes", "named_leaves", "pair_axes", "path_name"),
    "collecting_task": ("CollectionResult", "CollectingTask"),
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
        "suggest_name",
    ),
    "layout.layout": ("Layout", "current_layout", "current_target", "use_layout"),
    "params.logical": ("LogicalAxis", "Role", "DivisibilityPolicy", "register_axes"),
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
    "params.module": (
        "Module",
        "constant",
        "logical_axes",
        "name_key",
        "normal",
        "parameter",
        "stack",
        "stacked_modules",
    ),
    "protocols": ("Axes", "Batch", "IncrementalModel", "ModelState", "Params", "Position", "Source", "SourcedBatch"),
    "serializable": ("register_serializable",),
    "params.scopes": ("current_scope", "is_debugging", "use_eager_values", "scope"),
    "state": ("StepGuard", "TrainState"),
    "layout.target": ("Target", "PlatformTraits"),
    "task": ("DataFacts", "Evaluation", "Gradients", "Task"),
    "monitors": ("HeatMap", "MetricMonitor", "MonitorReport"),
}

__getattr__ = lazy_getattr(__name__, _WHERE)

__all__ = [
    "Axes", "Batch", "CheckpointError", "CollectingTask", "CollectionResult", "DamagedError", "DataChecks",
    "DataError", "DataFacts", "DivisibilityPolicy", "Evaluation", "Gradients", "HeatMap", "IncrementalModel", "Layout",
    "LayoutError", "LogicalAxis", "Loss", "Losses", "Maximum", "Mean", "MeanWithInterval", "MetricMonitor", "Metrics",
    "ModelState", "Module", "MonitorReport", "PanaxError", "Params", "PlatformTraits", "Position", "RecipeError",
    "RocHistogram", "Role", "Source", "SourcedBatch", "StepGuard", "StoreError", "Sum", "Target", "Task", "TrainState",
    "TrainingError", "annotation_axes", "constant", "current_layout", "current_scope", "current_target", "dropout",
    "is_debugging", "logical_axes", "map_axes", "merge_measures", "name_key", "named_leaves", "normal", "pair_axes",
    "parameter", "path_name", "register_axes", "register_serializable", "scope", "stack", "stacked_modules",
    "suggest_name", "total_loss", "uniform", "use_eager_values", "use_layout",
]  # fmt: skip
