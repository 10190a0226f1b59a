"""The experiment of a run, rebuilt from the settings in its checkpoints: only classes of Panax's own settings are built."""

import dataclasses
import json
from collections.abc import Iterator, Mapping
from typing import Any

from ... import comms, data, kernels, mesh, optim
from ...checkpoint import CheckpointConfig
from ...checkpoint.memory import MemoryConfig
from ...core import CollectingTask
from ...core.errors import CheckpointError, RecipeError
from ...core.former_names import with_present_names
from ...generate.scoring import QuestionConfig
from ...system import json_reader
from ...train import StepConfig
from ..experiment import EvaluateConfig, Experiment, ProbeConfig, RollbackConfig, VerifyConfig
from ..reporting.evaluation import DATA_CLASSES
from .description import deserialize_config, deserialize_task

DROPPED = ("hooks", "trackers")
"""Settings that act beside the steps and may be of any class: a rebuilt experiment has none of them."""

_OWN_CLASSES = (
    StepConfig, EvaluateConfig, QuestionConfig, ProbeConfig, RollbackConfig, VerifyConfig, CheckpointConfig, MemoryConfig,
    mesh.MeshShape, mesh.Rules, comms.Comms, comms.Islands, kernels.Kernels, data.BatchRamp, data.RowNumbers,
)  # fmt: skip


def _dataclasses_of(room: Any) -> dict[str, type]:
    """Return the settings that a room exports, by class name."""
    exported = {name: getattr(room, name) for name in room.__all__}
    return {name: each for name, each in exported.items() if isinstance(each, type) and dataclasses.is_dataclass(each)}


def settings_classes() -> dict[str, type]:
    """Return the classes from which an experiment is built, by name."""
    own = {each.__name__: each for each in _OWN_CLASSES}
    return {**_dataclasses_of(optim), **DATA_CLASSES, **own}


def rebuild_experiment(text: str, where: str) -> Experiment:
    """Build an experiment from the settings that a run has saved.

    Hooks and trackers are dropped, which change no step. Nothing is imported or run that the text names.

    Args:
        text: JSON, the attachment `experiment.json` of a checkpoint.
        where: Its address, for errors.

    Raises:
        CheckpointError: The text holds no settings, or names a class that is not one of Panax's settings, such as a task,
            a source of data or a part of the step that the user has written.
    """
    try:
        settings = with_present_names(json_reader.parse(text, constants=True))
    except ValueError as error:
        raise CheckpointError(f"{where} is not JSON: {error}") from error
    if not isinstance(settings, dict) or settings.get("type") != "Experiment":
        raise CheckpointError(f"{where} holds no experiment; expected the settings of a run")
    task = deserialize_task(json.dumps(settings.get("task")), f"{where}: task")
    values: dict[str, Any] = {"task": task}
    classes = settings_classes()
    skipped = {*DROPPED, "task", *(("data", "held_out") if isinstance(task, CollectingTask) else ())}
    for field in dataclasses.fields(Experiment):
        if field.name in settings and field.name not in skipped:
            values[field.name] = _built(settings[field.name], f"{where}: {field.name}", classes)
    try:
        return Experiment(**values)
    except (TypeError, ValueError, RecipeError) as error:
        raise CheckpointError(f"{where} can't be rebuilt: {error}") from error


def _built(value: Any, where: str, classes: Mapping[str, type]) -> Any:
    opaque = next(_opaque_values(value), None)
    if opaque is not None:
        raise CheckpointError(f"{where} was {opaque}, which no file describes")
    return deserialize_config(value, where, classes)


def _opaque_values(value: Any) -> Iterator[str]:
    """Yield the descriptions of values that JSON can't represent, such as "<optax.chain #a1b2>"."""
    if isinstance(value, str) and value.startswith("<") and value.endswith(">"):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from _opaque_values(item)
    elif isinstance(value, list):
        for item in value:
            yield from _opaque_values(item)
