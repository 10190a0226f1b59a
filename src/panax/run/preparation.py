"""Preparation of a run: data opened, state abstract, mesh laid out, step ready to compile."""

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np

from ..comms import Islands
from ..core import DataFacts, Source, Task
from ..core.errors import RecipeError
from ..core.layout.target import device_target
from ..data import BatchRamp, ExampleData, IterableSource, TextData
from ..data.loading.batch_conversion import ConvertedSource, convert_batches
from ..data.loading.batch_ramp import apply_batch_ramp
from ..data.loading.class_agreement import align_held_out
from ..data.loading.overfit import FirstBatches
from ..data.loading.shard import BatchShard
from ..job.heartbeat import heartbeat
from ..kernels import choose_by_timing
from ..mesh import Placement
from ..mesh.model_places import with_shardings
from ..optim import Schedule
from ..plan.search.auto import DeviceGroup
from ..plan.step import text_batch
from ..rollouts.rollout_data import RolloutData
from ..system import files
from ..system.platform_check import check_platform
from ..train import CompiledStep, Program
from ..train.assembly.setting_checks import check_rows_together
from ..train.compilation.mesh_requirements import mesh_requirements
from ..train.debug import DebugStep
from ..train.precision import describe_precision, with_compute_dtype
from .auto_mesh import resolve_auto_mesh
from .degraded_features import pause_comms
from .experiment import Experiment
from .opened_data import LogFn, OpenedData, to_source
from .tools.slow_axes import resolve_slow_axes
from .whole_data import open_full


@dataclasses.dataclass(frozen=True)
class PreparedRun:
    """A run that has not started: nothing is compiled, no parameter is allocated.

    Attributes:
        folder: The run's folder, as an absolute path.
    """

    experiment: Experiment
    task: Task
    data: OpenedData
    step: CompiledStep | DebugStep
    folder: str = dataclasses.field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "folder", str(files.absolute_path(self.experiment.folder)))

    @property
    def placement(self) -> Placement | None:
        """The run's mesh with its sharding rules; None if it is debugged, which takes one device."""
        return self.step.placement if isinstance(self.step, CompiledStep) else None

    @property
    def weight_places(self) -> tuple[Any, Any]:
        """Shapes, dtypes and shardings of parameters and model state."""
        step = self.step
        abstract, places = step.program.abstract, step.shardings
        return with_shardings((abstract.params, abstract.model_state), (places.params, places.model_state))


def open_data(experiment: Experiment, say: LogFn) -> OpenedData:
    """Open the experiment's data, in any form that `Experiment.data` accepts.

    Raises:
        DataError: The data can't be read, or is empty.
    """
    opened = _opened(experiment, say)
    if opened.rollouts is not None:
        return opened
    held_out = None if opened.held_out is None else convert_batches(opened.held_out, experiment.task)
    opened = dataclasses.replace(opened, train=convert_batches(opened.train, experiment.task), held_out=held_out)
    if not experiment.overfit_batches:
        return opened
    say(f"training on the first {experiment.overfit_batches} batches alone, and evaluating on them")
    first = FirstBatches(opened.train, experiment.overfit_batches)
    # Statistics of the held-out text are not those of these batches.
    return dataclasses.replace(
        opened, train=first, held_out=first.without_repeats, unigram_entropy=None, bytes_per_target=None
    )


def _opened(experiment: Experiment, say: LogFn) -> OpenedData:
    data = experiment.data
    if experiment.held_out is not None and isinstance(data, TextData | ExampleData):
        if data.held_out:
            say("held_out is given: data.held_out is not used, and all of data is trained on")
            data = dataclasses.replace(data, held_out=0)
        training_data = _opened(dataclasses.replace(experiment, data=data, held_out=None), say)
        return _with_held_out(training_data, experiment, say)
    if isinstance(data, TextData):

        def progress(action: str, documents: int, tokens: int) -> None:
            heartbeat().report_progress("prepare")
            say(f"{action}: {documents:,} documents" + (f", {tokens:,} tokens" if tokens else ""))

        opened = data.open(progress=progress)
        for note in (*opened.notes, *opened.account):
            say(note)
        facts = DataFacts(opened.vocab_size, data.sequence_length)
        shapes = 1 if data.packing else len({*data.buckets, data.sequence_length})
        nats = opened.unigram_entropy_nats if opened.held_out is not None else math.nan
        entropy = nats if math.isfinite(nats) else None
        size = opened.bytes_per_target if opened.held_out is not None else None
        return OpenedData(opened.train, opened.held_out, facts, opened.tokenizer, shapes, entropy, size)
    if isinstance(data, RolloutData):
        rollouts = data.open()
        facts = DataFacts(rollouts.tokenizer.vocab_size, data.length)
        return OpenedData(
            rollouts.train, rollouts.held_out, facts, rollouts.tokenizer, shapes=data.shapes, rollouts=rollouts
        )
    if isinstance(data, ExampleData):
        examples = data.open()
        for note in examples.account:
            say(note)
        return OpenedData(
            examples.train, examples.held_out, DataFacts(num_classes=examples.num_classes, num_ids=examples.num_ids)
        )
    train = to_source(data)
    opened = OpenedData(train, None, DataFacts(), shapes=len(getattr(train, "buckets", ())) or 1)
    return opened if experiment.held_out is None else _with_held_out(opened, experiment, say)


def _with_held_out(opened: OpenedData, experiment: Experiment, say: LogFn) -> OpenedData:
    """Add the experiment's held-out data, with ids that mean the same as in training."""
    data = experiment.held_out
    if not isinstance(data, TextData | ExampleData):
        held_out, notes = align_held_out(to_source(data, epochs=1), opened.train)
        for note in notes:
            say(note)
        return dataclasses.replace(opened, held_out=held_out)
    say("held-out data:")
    held_out_data = open_full(data, experiment.data, opened.tokenizer, source=opened.train, say=say)
    return dataclasses.replace(
        opened,
        held_out=held_out_data.held_out,
        shapes=max(opened.shapes, held_out_data.shapes),
        unigram_entropy=None,
        bytes_per_target=held_out_data.bytes_per_target,
    )


def prepare(
    experiment: Experiment, say: LogFn = lambda line: None, devices: Any = None, *, compute_dtype: str = ""
) -> PreparedRun:
    """Prepare the run of an experiment, and raise any error in it before anything is compiled.

    Args:
        compute_dtype: Compute dtype of a task that leaves it to the devices; by default the one in which they
            are fast.
    """
    check_platform()
    _check_pairs(experiment)
    choose_by_timing(devices=devices)
    data = open_data(experiment, say)
    task = with_compute_dtype(
        experiment.task.adapt_to_data(data.facts),
        device_target((devices or jax.devices())[0]),
        say,
        recorded=compute_dtype,
    )
    source = data.train
    experiment = scale_learning_rate(experiment, lambda: batch_shapes(experiment, source), say)
    experiment, task = resolve_auto_mesh(
        experiment,
        task,
        make_program,
        lambda: batch_shapes(experiment, source),
        data.batch_axes(task),
        lambda: DeviceGroup.of(devices),
        say,
    )
    data = _shared(_with_ramp(data, experiment.batch_ramp, say), experiment.comms.islands)
    check_rows_together(task, experiment.step, experiment.comms)
    program = make_program(experiment, task)
    for line in () if program.widths is None else program.widths.describe():
        say(line)
    if program.tables is not None and program.has_average:
        say("averages are of all parameters but the tables, which are evaluated as they are")
    if experiment.debug:
        return PreparedRun(
            experiment, task, data, DebugStep(program, data.batch_axes(task), shapes_allowed=data.shapes)
        )
    placement = Placement.create(experiment.mesh, experiment.rules, devices, mesh_requirements(program))
    program = pause_comms(program, placement, say)
    program = resolve_slow_axes(program, placement, experiment.folder, say)
    comms = program.comms if experiment.comms.islands.count == 1 else experiment.comms
    for words in (describe_precision(task, placement.target), comms.describe()):
        if words is not None:
            say(words)
    return PreparedRun(
        experiment, task, data, CompiledStep(program, placement, data.batch_axes(task), shapes_allowed=data.shapes)
    )


def _check_pairs(experiment: Experiment) -> None:
    """Raise a RecipeError if a task would learn both answers of pairs."""
    data, task = experiment.data, experiment.task
    if isinstance(data, TextData) and data.has_groups and not task.reads_pairs:
        raise RecipeError(
            f"{experiment.name}: the data has pairs of answers, or labeled ones, and {type(task).__name__} would learn the bad "
            f"ones too; set task.objective=Preference(), or Kto() for labels (--preference dpo, or kto), or train a RewardTask"
        )


def _with_ramp(data: OpenedData, ramp: BatchRamp, say: LogFn) -> OpenedData:
    """Apply the ramp of the global batch to the data, and report it; each batch size is one more shape."""
    if not ramp.parts:
        return data
    sizes = ", ".join(f"a {count}th" if count > 2 else "a half" for count in ramp.parts)
    say(f"batch ramp: {ramp.steps} steps each with {sizes} of the batch, then all of it from step {ramp.end + 1} on")
    return dataclasses.replace(
        data, train=apply_batch_ramp(data.train, ramp), shapes=data.shapes * (1 + len(ramp.parts))
    )


def _shared(data: OpenedData, islands: Islands) -> OpenedData:
    """Return the data of an island: its rows of each training batch, but all of the held-out data."""
    if islands.count == 1:
        return data
    held_out = None if data.held_out is None else BatchShard(data.held_out, 0, 1)
    return dataclasses.replace(data, train=BatchShard(data.train, islands.index, islands.count), held_out=held_out)


def batch_shapes(experiment: Experiment, source: Source) -> dict[str, Any]:
    """Return the shapes of a global batch: of text without reading any, otherwise of the first batch."""
    if isinstance(experiment.data, TextData):
        return text_batch(experiment.data)
    if isinstance(experiment.data, RolloutData):
        return experiment.data.batch_shapes(experiment.task)
    first = (
        source.first_batch()
        if isinstance(source, IterableSource | ConvertedSource)
        else next(iter(source.batches())).batch
    )
    return {name: jax.ShapeDtypeStruct(np.shape(leaf), np.asarray(leaf).dtype) for name, leaf in first.items()}


def first_batch(prepared: PreparedRun) -> dict[str, Any]:
    """Return a batch of a run's steps, to trace them: the first one, or its shapes if these are known without data."""
    data = prepared.experiment.data
    if isinstance(data, TextData | RolloutData):
        return batch_shapes(prepared.experiment, prepared.data.train)
    return dict(next(iter(prepared.data.train.batches())).batch)


def refuse_rollouts(experiment: Experiment, function: str) -> None:
    """Raise a RecipeError if an experiment learns from rollouts, which `function` can't draw."""
    if isinstance(experiment.data, RolloutData):
        raise RecipeError(
            f"{function} takes steps on batches of data, and {experiment.name} draws its own by the model that learns from them; "
            f"compare whole runs instead (panax sweep)"
        )


def scale_learning_rate(experiment: Experiment, shapes: Callable[[], Mapping[str, Any]], say: LogFn) -> Experiment:
    """Apply the learning-rate rule for the batch size to an experiment, and report the result.

    Args:
        shapes: Returns the shapes of a batch; not called without a rule.
    """
    changed: dict[str, Any] = {}
    for name, subject in (("optimizer", "learning rate"), ("embedding_optimizer", "of tables")):
        optimizer = getattr(experiment, name)
        if optimizer is None or not isinstance(schedule := optimizer.schedule, Schedule) or schedule.base_batch is None:
            continue
        rows = next(iter(shapes().values())).shape[0]
        chosen = schedule.scale_to_batch(rows)
        root = {"linear": "", "sqrt": "the root of "}[schedule.per_batch]
        say(
            f"{subject:14} peak {chosen.peak:.3g} for {rows:,} rows a batch: {schedule.peak:.3g} times "
            f"{root}{rows:,} / {schedule.base_batch:,}"
        )
        changed[name] = optimizer.scale_to_batch(rows)
    return dataclasses.replace(experiment, **changed) if changed else experiment


def make_program(experiment: Experiment, task: Task) -> Program:
    """Create the step's program for a task with all open settings filled in."""
    return Program.create(
        task.debug_variant() if experiment.debug else task,
        experiment.optimizer,
        num_steps=experiment.num_steps,
        config=experiment.step,
        frozen=experiment.frozen,
        kernels=experiment.kernels,
        comms=experiment.comms.mesh_settings,
        embedding_optimizer=experiment.embedding_optimizer,
        parts=experiment.step_parts,
    )
