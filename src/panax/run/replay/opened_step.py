"""`at`: a step of a run, opened."""

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from ...checkpoint import Checkpoint, Checkpointer
from ...compiling.cache import install_compile_cache
from ...core import CollectingTask, TrainState, named_leaves, pair_axes
from ...core.errors import CheckpointError, RecipeError, describe_type
from ...data.loading.class_agreement import find_class_names
from ...data.loading.preview import format_batch
from ...train import CompiledStep
from ...train.taps.origin import find_origin
from ...train.taps.statistics import ArrayStatistics, is_measurable, measure_array, read_statistics
from ...train.taps.tapped_step import GradientTap, TappedResult, take_tapped_step
from ..experiment import Experiment
from ..folder.saved_experiment import rebuild_experiment
from ..opened_data import LogFn
from ..preparation import make_program
from .record import RunRecords, count_ulps, read_records
from .replay import MAX_STEPS, ReplayedStep, replay_step, run_folder, settings_at
from .row_shares import RowShares, measure_row_shares
from .step_view import ParameterFacts, StepView

MAX_ROWS = 256
"""Default maximum number of rows of which shares of the gradient are computed."""


def at(
    run: str | Path | Experiment,
    step: int,
    *,
    recipe: Experiment | None = None,
    max_steps: int = MAX_STEPS,
    rows: int = MAX_ROWS,
    ahead: int = 1,
    show_rows: int = 3,
    say: LogFn = lambda line: None,
    devices: Any = None,
) -> StepView:
    """Open a step of a run: replay it from the nearest checkpoint before it, compare it with the run's record to the bit, and
    measure its batch, activations, gradients and updates.

    Nothing in the run's folder changes, and the run may be training meanwhile.

    Args:
        run: A run's folder, or the run's experiment.
        step: Number of the step, from 1.
        recipe: The run's experiment, if its settings name classes that a file can't describe (a model or data of yours). By
            default it is rebuilt from the settings that the run has saved.
        max_steps: Maximum number of steps that are replayed to reach the step.
        rows: Shares of the gradient are computed of a batch of at most this many rows; 0 for none.
        ahead: Number of batches after the step's that `StepView.what_if` continues with.
        show_rows: Number of rows of text in the batch that is shown.
        devices: JAX devices to use; None for all of them.

    Raises:
        CheckpointError: The folder is not a run's, the step is out of reach, or its settings can't be rebuilt.
        RecipeError: The run is of a kind that can't be replayed, or the recipe is not the run's.
        DataError: The data, or a file in the run's folder, has changed.
    """
    if isinstance(run, Experiment):
        run, recipe = run.folder, run
    if type(step) is not int or step < 1:
        raise RecipeError(f"step={step!r}; expected the number of a step, from 1")
    folder = run_folder(run)
    records = read_records(folder)
    experiment = find_experiment(records, step, recipe)
    install_compile_cache(say)
    replay = replay_step(experiment, records, step, say, max_steps=max_steps, ahead=ahead, devices=devices)
    return open_view(str(folder), replay, rows=rows, show_rows=show_rows, say=say)


def find_experiment(records: RunRecords, step: int, recipe: Experiment | None) -> Experiment:
    """Return the experiment of a run at a step, with the run's folder as its directory.

    Raises:
        CheckpointError: Its settings can't be rebuilt; the message names the command of the run.
    """
    if recipe is not None:
        if not isinstance(recipe, Experiment):
            raise RecipeError(f"recipe is {describe_type(recipe)}; expected the run's Experiment")
        return dataclasses.replace(recipe, directory=str(records.folder))
    text, where = settings_at(records, _some_checkpoint(records.folder), step)
    try:
        experiment = rebuild_experiment(text, where)
    except CheckpointError as error:
        session = records.session_of(step)
        command = session.facts.get("command") if session is not None else None
        started = f" (it was started as `{' '.join(map(str, command))}`)" if isinstance(command, list) else ""
        raise CheckpointError(
            f"{error}. Pass the run's recipe{started}: --recipe RECIPE [flags], or recipe=... in Python"
        ) from error
    return dataclasses.replace(experiment, directory=str(records.folder))


def _some_checkpoint(folder: Path) -> Checkpoint | None:
    """Return the newest checkpoint in a run's own folder; None if there is none."""
    if not (folder / "checkpoints").is_dir():
        return None
    return next(Checkpointer(folder / "checkpoints", say=lambda line: None).newest_first(), None)


def open_view(run: str, replay: ReplayedStep, *, rows: int, show_rows: int, say: LogFn) -> StepView:
    """Measure a replayed step: compile it again with taps, look for values that are not finite, replay its rows."""
    prepared, step = replay.prepared, _tapped_step(replay)
    say("measuring what leaves each module")
    tapped = take_tapped_step(step, replay.before, replay.batch)
    loss, tapped_loss = replay.scalars.get("loss", 0.0), float(jax.device_get(tapped.scalars.get("loss", 0.0)))
    origin = None
    if _has_fault(replay, tapped):
        say("looking for the first value that is not finite")
        origin = find_origin(step, replay.before, replay.batch)
    shares: RowShares | str = "not computed (--rows 0)"
    if rows:
        say("computing each row's share of the gradient")
        shares = measure_row_shares(prepared.step.program, replay.before, replay.batch, rows)
    batch = format_batch(
        jax.device_get(dict(replay.batch)), prepared.data.tokenizer, show_rows, find_class_names(prepared.data.train)
    )
    return StepView(
        run,
        replay,
        tuple(batch),
        tapped.outputs,
        count_ulps(loss, tapped_loss),
        tuple(_parameters(replay, tapped)),
        origin,
        shares,
        tuple(_notes(replay)),
    )


def _tapped_step(replay: ReplayedStep) -> CompiledStep:
    """Return the run's step with its gradients among the results; of a task with several updates, the step as it is."""
    prepared, step = replay.prepared, replay.prepared.step
    assert isinstance(step, CompiledStep)
    experiment = prepared.experiment
    if not isinstance(prepared.task, CollectingTask) and step.program.abstract.replicas is None:
        experiment = dataclasses.replace(experiment, step_parts=(*experiment.step_parts, GradientTap()))
    program = make_program(experiment, prepared.task)
    # Settings that are resolved when a run is prepared.
    program = dataclasses.replace(program, comms=step.program.comms)
    return CompiledStep(program, step.placement, prepared.data.batch_axes(prepared.task), donates=False)


def _has_fault(replay: ReplayedStep, tapped: TappedResult) -> bool:
    scalars = [value for name, value in replay.scalars.items() if name in ("loss", "gradient_norm", "parameter_norm")]
    return not np.isfinite(scalars).all() or any(each.statistics.nan > 0 for each in tapped.outputs)


def _notes(replay: ReplayedStep) -> Iterator[str]:
    task = replay.prepared.task
    if task.updates_per_step > 1:
        yield (
            f"a step of {type(task).__name__} makes {task.updates_per_step} updates: activations are merged over all of "
            f"them, and single gradients are not shown"
        )
    if replay.scalars.get("skipped_in_a_row", 0) > 0:
        yield "the update of this step was skipped: parameters did not change"


def _parameters(replay: ReplayedStep, tapped: TappedResult) -> Iterator[ParameterFacts]:
    values, updates = jax.device_get(_measure_update(replay.before, replay.after))
    sizes = {name: leaf.size for name, leaf in named_leaves(replay.before.params).items()}
    axes = {
        name: leaf_axes
        for name, _, leaf_axes in pair_axes(replay.before.params, replay.prepared.step.program.axes.params)
    }
    for name, vector in values.items():
        gradient = tapped.gradients.get(name)
        yield ParameterFacts(
            name,
            _read(vector, sizes[name]),
            None if gradient is None else _read(gradient, sizes[name]),
            _read(updates[name], sizes[name]),
            tuple(_dead_parts(tapped.dead.get(name), axes.get(name, ()))),
        )


def _dead_parts(mask: np.ndarray | None, axes: Sequence[str | None]) -> Iterator[str]:
    """Yield the parts of a parameter with a gradient of zero, named by their logical axes, such as "expert 3 of layer 1"."""
    if mask is None or mask.all():
        return
    first, second = (axis or "index" for axis in (*axes, "", "")[:2])
    for one, two in np.argwhere(mask):
        yield f"{second} {two} of {first} {one}"


def _read(vector: np.ndarray, size: int) -> ArrayStatistics:
    return read_statistics(vector[None], size)


@jax.jit
def _measure_update(before: TrainState, after: TrainState) -> tuple[Mapping[str, jax.Array], Mapping[str, jax.Array]]:
    """Return the statistics of each parameter before a step, and of its change, as vectors by name."""
    first, second = named_leaves(before.params), named_leaves(after.params)
    measured = {name: leaf for name, leaf in first.items() if is_measurable(leaf.shape, leaf.dtype)}
    updates = {
        name: measure_array(second[name].astype(np.float32) - leaf.astype(np.float32))
        for name, leaf in measured.items()
    }
    return {name: measure_array(leaf) for name, leaf in measured.items()}, updates
