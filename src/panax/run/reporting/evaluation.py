"""Evaluation of a trained model on the data its run held out or on other data: a result, a loaded model, or a
run's folder."""

import contextlib
import dataclasses
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import jax

from ... import data as sources
from ...checkpoint import open_checkpoint
from ...core import CollectingTask, TrainState
from ...core.errors import CheckpointError, DataError, LayoutError, RecipeError
from ...data import ExampleData, TextData
from ...kernels import choose_by_timing
from ...mesh import MeshShape, Placement
from ...optim import Sgd
from ...system import json_reader
from ...train import CompiledStep, Program, evaluate_sent
from ...train.compilation.mesh_requirements import mesh_requirements
from ...train.debug import DebugStep
from ..experiment import Experiment
from ..feed import prefetch_to_device
from ..folder.description import deserialize_config
from ..folder.previous_run import SETTINGS
from ..opened_data import LogFn, OpenedData
from ..preparation import PreparedRun, open_data
from ..whole_data import check_same_classes, is_endless, open_full, rename_leaves, set_tokenizer

if TYPE_CHECKING:
    from ..folder.trained_model import LoadedModel

DATA_CLASSES = {
    name: getattr(sources, name)
    for name in (
        "TextData", "PythonLibrary", "TextFiles", "Chats", "Preferences", "LabeledAnswers", "Jsonl", "Parquet", "Arrow",
        "ArrayRecord",
        "WebDataset", "Mds", "HuggingFaceDisk", "TokenFile", "MegatronTokens", "FilteredCorpus", "ConcatCorpus",
        "Mixture", "MixtureComponent", "BytePairTokenizer", "PretrainedTokenizer", "ExampleData", "ImageFolder",
        "ParquetImages", "WebDatasetImages", "Digits", "Table", "Bag", "IntegerIds", "HashBuckets", "HashedIds",
        "CountVocabulary", "Calendar", "Sequences", "Criteo", "ClickArrays", "SyntheticClicks", "Augmentation",
        "PaddedCrop", "RandomCrop", "RandAugment", "Mixing",
    )
}  # fmt: skip
"""Classes that a run's settings may name as its data; nothing else is built from a file."""


def evaluate_result(
    prepared: PreparedRun, state: TrainState, data: Any = None, batches: int | None = None
) -> dict[str, float]:
    """Evaluate a state on its mesh; see `evaluate`."""
    experiment = prepared.experiment
    if prepared.data.rollouts is not None:
        raise RecipeError(
            f"{experiment.name} learns from rollouts, which are evaluated while it trains (evaluation/reward); to measure the "
            f"model, ask it questions: `panax evaluate {prepared.experiment.folder} --tasks FILE`"
        )
    if data is None:
        max_batches = experiment.evaluate.batches if batches is None else batches
        return _evaluate_held_out(prepared.step, state, prepared.data, max_batches)
    opened = open_full(data, experiment.data, prepared.data.tokenizer, source=prepared.data.train)
    task = prepared.task.adapt_to_data(opened.facts)
    opened = rename_leaves(opened, task)
    check_same_classes(opened.facts, prepared.data.facts)
    program = prepared.step.program
    axes = opened.train.axes
    if isinstance(prepared.step, DebugStep):
        step = DebugStep(program, axes, shapes_allowed=opened.shapes)
    else:
        step = CompiledStep(program, prepared.step.placement, axes, shapes_allowed=opened.shapes)
    return _evaluate_held_out(step, state, opened, batches or 0)


def evaluate_loaded_model(
    trained: "LoadedModel",
    data: Any = None,
    batches: int | None = None,
    *,
    fields: Mapping[str, str] | None = None,
    say: LogFn = lambda line: None,
) -> dict[str, float]:
    """Evaluate a loaded model, on the run's mesh if there are enough devices for it, otherwise on one; see
    `evaluate`.

    Args:
        fields: The fields of records in `data` with the `text`, or the `prompt` and the `answer`; by default
            those of the run's data.
        say: Called with notes about the data, a line at a time.
    """
    settings = _settings(trained)
    if data is None:
        opened = _held_out(trained, settings)
        max_batches = settings.get("evaluate", {}).get("batches", 0) if batches is None else batches
    else:
        opened = open_full(
            data, _described_data(settings), trained.tokenizer, classes=trained.classes, fields=fields, say=say
        )
        max_batches = batches or 0
    choose_by_timing()
    task = trained.task.adapt_to_data(opened.facts)
    opened = rename_leaves(opened, task)
    program = Program.create(task, Sgd(), num_steps=1)
    step = CompiledStep(
        program, _placement(program, settings), (opened.held_out or opened.train).axes, shapes_allowed=opened.shapes
    )
    state = step.init(0)
    places = step.shardings
    state = dataclasses.replace(
        state,
        params=jax.device_put(jax.device_get(trained.params), places.params),
        model_state=jax.device_put(jax.device_get(trained.state), places.model_state),
    )
    evaluation = _evaluate_held_out(step, state, opened, max_batches)
    decay = settings.get("step", {}).get("ema_decay")
    if decay is not None:
        return {**evaluation, "ema_decay": decay}
    return {**evaluation, "averaged": 1.0} if trained.averaged else evaluation


def _held_out(trained: "LoadedModel", settings: Mapping[str, Any]) -> OpenedData:
    """Open the data that the run of a checkpoint held out."""
    if isinstance(trained.task, CollectingTask):
        return open_data(Experiment(task=trained.task), lambda line: None)
    like = _described_data(settings)
    if like is None:
        kind = settings.get("data")
        kind = kind.get("type", "nothing") if isinstance(kind, dict) else str(kind)
        raise RecipeError(
            f"{trained.url} is of a run with data that can't be read from its settings ({kind[:60]}); pass data: "
            "--data PATH, or in "
            f"Python a source or batches"
        )
    few = settings.get("overfit_batches", 0)
    experiment = Experiment(task=trained.task, data=like, overfit_batches=few if isinstance(few, int) else 0)
    if not isinstance(like, TextData):
        return open_data(experiment, lambda line: None)
    with set_tokenizer(like, trained.tokenizer) as ours:
        return open_data(dataclasses.replace(experiment, data=ours), lambda line: None)


def _settings(trained: "LoadedModel") -> Mapping[str, Any]:
    text = open_checkpoint(trained.url).attachment(SETTINGS)
    try:
        settings = json_reader.parse(text or "{}", constants=True)
    except ValueError as error:
        raise CheckpointError(f"{SETTINGS} of {trained.url} is not JSON: {error}") from error
    if not isinstance(settings, dict):
        raise CheckpointError(f"{SETTINGS} of {trained.url} holds no settings")
    return settings


def _described_data(settings: Mapping[str, Any]) -> TextData | ExampleData | None:
    """Build the data that settings describe; None if they name a class that is not one of Panax."""
    try:
        data = deserialize_config(settings.get("data"), SETTINGS, DATA_CLASSES)
    except CheckpointError:
        return None
    return data if isinstance(data, TextData | ExampleData) else None


def _placement(program: Program, settings: Mapping[str, Any]) -> Placement:
    with contextlib.suppress(LayoutError, CheckpointError):
        mesh = deserialize_config(settings.get("mesh"), SETTINGS, {"MeshShape": MeshShape})
        if isinstance(mesh, MeshShape):
            return Placement.create(mesh, needs=mesh_requirements(program))
    return Placement.create(MeshShape(), devices=jax.devices()[:1], needs=mesh_requirements(program))


def _evaluate_held_out(step: Any, state: TrainState, opened: OpenedData, max_batches: int) -> dict[str, float]:
    """Evaluate on the held-out source of `opened`."""
    if max_batches < 0:
        raise RecipeError(f"batches={max_batches}; expected 1 or more, or 0 for all")
    source = opened.held_out
    if source is None:
        raise RecipeError("the run held nothing out; pass data: --data PATH, or in Python paths, a source or batches")
    if not max_batches and is_endless(source):
        raise RecipeError("the data has no end; pass the number of batches: --batches N (batches=N)")
    with contextlib.closing(
        prefetch_to_device(source, step, max_batches=max_batches or None, evaluates=True)
    ) as batches:
        evaluation = evaluate_sent(step, state, (batch for batch, _, _ in batches))
    if not evaluation:
        raise DataError(
            "nothing in the data counts: no target carries loss, so there is no figure. Look at it with `panax data show`: "
            "answers may be cut away (raise data.sequence_length), or every row may be masked out"
        )
    return dict(opened.add_bits_per_byte(evaluation))
