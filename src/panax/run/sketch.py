"""Sketch of an experiment's step with the shapes of its batches, as far as they are known without reading a
corpus."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from ..core import DataFacts, Task
from ..core.errors import RecipeError
from ..core.layout.target import device_target
from ..data import BytePairTokenizer, TextData
from ..data.text.token_source import leaf_axes
from ..mesh import Placement
from ..plan.search.auto import DeviceGroup
from ..plan.step import text_batch
from ..train.compilation.mesh_requirements import mesh_requirements
from ..train.compiled_step import CompiledStep
from ..train.precision import with_compute_dtype
from .auto_mesh import LogFn, resolve_auto_mesh
from .blank_data import find_missing_data
from .experiment import Experiment
from .parts.answer_judges import find_second_models
from .parts.frozen_model import FrozenModel
from .preparation import first_batch, make_program, prepare, scale_learning_rate
from .tools.slow_axes import resolve_slow_axes


@dataclasses.dataclass(frozen=True)
class Sketch:
    """The task of a run, with its step and the shapes of its batches.

    Attributes:
        task: The task, with the settings that the recipe left open filled in.
        step: The step, not compiled.
        batch: Returns the shapes of a training batch.
        sequence_length: Length of a row of text; None for other data.
        models: Further models beside the one that is trained, by the setting that names each.
    """

    experiment: Experiment
    task: Task
    step: Any
    batch: Callable[[], dict[str, Any]]
    sequence_length: int | None = None
    models: Mapping[str, FrozenModel] = dataclasses.field(default_factory=dict)


def sketch_step(
    experiment: Experiment,
    devices: list[Any],
    say: LogFn,
    memory_bytes: int | None = None,
    fast_domain: int | None = None,
) -> Sketch:
    """Sketch an experiment's step on the given devices.

    Text is not tokenized, since its batches' shapes are known; the vocabulary is the task's or the
    tokenizer's.

    Args:
        devices: Attached devices, or those of a target.
        memory_bytes: Memory of each device, if the devices can't report it.
        fast_domain: Number of devices joined by the fast network; by default from the target's traits.

    Raises:
        PanaxError: The experiment does not fit the devices, or its data can't be opened.
    """
    data = experiment.data
    if not isinstance(data, TextData):
        if (blank := find_missing_data(experiment)) is not None:
            experiment = blank.fill(experiment)
        prepared = prepare(experiment, say, devices)
        models = find_second_models(prepared)
        return Sketch(experiment, prepared.task, prepared.step, lambda: first_batch(prepared), models=models)
    try:
        task = experiment.task.adapt_to_data(DataFacts(None, data.sequence_length))
    except RecipeError:
        if not isinstance(data.tokenizer, BytePairTokenizer):
            raise
        say(
            f"the corpus is not read: the vocabulary is assumed to be its tokenizer's maximum, {data.tokenizer.vocab_size}"
        )
        task = experiment.task.adapt_to_data(DataFacts(data.tokenizer.vocab_size, data.sequence_length))
    task = with_compute_dtype(task, device_target(devices[0]), say)
    absent = task.required_leaves - data.leaves.keys()
    # Those with a number for each token, as all leaves of text have.
    axes = leaf_axes(data.leaves)
    missing = sorted(name for name in absent if task.batch_axes.get(name) in axes.values())
    if missing:
        say(f"the batch is assumed to have {', '.join(missing)} too, which training adds")
    axes = {**axes, **{name: task.batch_axes[name] for name in missing}}

    def batch() -> dict[str, jax.ShapeDtypeStruct]:
        shape = (data.batch_size, data.sequence_length)
        return {**text_batch(data), **{name: jax.ShapeDtypeStruct(shape, jnp.float32) for name in missing}}

    experiment = scale_learning_rate(experiment, batch, say)
    experiment, task = resolve_auto_mesh(
        experiment,
        task,
        make_program,
        batch,
        axes,
        lambda: DeviceGroup.of(devices, memory_bytes, fast_domain),
        say,
    )
    program = make_program(experiment, task)
    placement = Placement.create(experiment.mesh, experiment.rules, devices, mesh_requirements(program))
    program = resolve_slow_axes(program, placement, experiment.folder, say)
    step = CompiledStep(program, placement, axes)
    return Sketch(experiment, task, step, batch, data.sequence_length)
