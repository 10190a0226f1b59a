"""A step taken again with one thing changed: without rows of its batch, or with other settings."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np

from ...core import TrainState, named_leaves
from ...core.batch_checks import MASK_LEAF, ROW_LEAF
from ...core.errors import LayoutError, RecipeError
from ...core.params.logical import batch_row_axes
from ...train import CompiledStep
from ...train.precision import with_compute_dtype
from ..experiment import Experiment
from ..folder.description import diff_configs, serialize_config
from ..preparation import make_program
from .replay import ReplayedStep, copy_state, read_scalars

CHANGEABLE = ("task", "optimizer", "embedding_optimizer", "step", "num_steps", "kernels", "step_parts")
"""Settings of the compiled step: with others it would be a step of other data, or from another state."""

IGNORED = ("name", "directory", "hooks", "trackers", "log_every", "profile", "checkpoint", "evaluate", "questions")
"""Settings of the parts of a run beside its steps."""


@dataclasses.dataclass(frozen=True)
class ChangedStep:
    """Scalars of a step with something changed, and of the step as it was.

    Attributes:
        change: What was changed, in one line.
        before: Scalars of the step as it was.
        after: Scalars of the changed step.
        following: Loss of the next batches after the step as it was, and after the changed one, each step taken as the run did.
        update_difference: Norm of the difference of the two updates, relative to the norm of the run's update.
    """

    change: str
    before: Mapping[str, float]
    after: Mapping[str, float]
    following: tuple[tuple[float, float], ...]
    update_difference: float


def take_what_if(replay: ReplayedStep, experiment: Experiment | None, without_rows: Sequence[int]) -> ChangedStep:
    """Take a step again from the same state; see `StepView.what_if`."""
    if experiment is None and not without_rows:
        raise RecipeError("what_if changes nothing: name rows to leave out, or pass an experiment with other settings")
    step, words = _run_step(replay), []
    changed_step = step
    if experiment is not None:
        changed_step, lines = _changed_step(replay, experiment)
        words += lines
    batch = dict(replay.batch)
    if without_rows:
        if MASK_LEAF not in batch:
            changed_step = _of_fewer_rows(replay, changed_step)
        batch = _without(changed_step, batch, without_rows)
        words.append(f"without row{'s' if len(without_rows) > 1 else ''} {', '.join(map(str, without_rows))}")
    state, scalars = changed_step(copy_state(replay.before), batch)
    after = read_scalars(scalars)
    difference = _relative_difference(replay, state)
    following, kept = [], copy_state(replay.after)
    for next_batch in replay.following:
        # The settings of the run again: what the change of this one step leads to.
        kept, of_run = step(kept, next_batch)
        state, of_change = step(state, next_batch)
        following.append((read_scalars(of_run)["loss"], read_scalars(of_change)["loss"]))
    return ChangedStep("; ".join(words), replay.scalars, after, tuple(following), difference)


def _run_step(replay: ReplayedStep) -> CompiledStep:
    assert isinstance(replay.prepared.step, CompiledStep)
    return replay.prepared.step


def _changed_step(replay: ReplayedStep, experiment: Experiment) -> tuple[CompiledStep, list[str]]:
    """Compile the step of other settings for the same state and batch.

    Raises:
        RecipeError: A setting is not one of the step, or the state would be another.
    """
    prepared, step = replay.prepared, _run_step(replay)
    before, after = serialize_config(prepared.experiment), serialize_config(experiment)
    for name in IGNORED:
        before.pop(name, None)
        after.pop(name, None)
    lines = list(diff_configs(before, after))
    refused = [line for line in lines if line.partition(":")[0].partition(".")[0] not in CHANGEABLE]
    if refused:
        raise RecipeError(
            f"{refused[0]}: this setting decides on the data, the layout or the first state, not on one step; expected a setting "
            f"of {', '.join(CHANGEABLE)}"
        )
    if not lines:
        raise RecipeError("no setting differs from the run's; expected a change")
    task = experiment.task.adapt_to_data(prepared.data.facts)
    task = with_compute_dtype(task, step.placement.target, lambda line: None, recorded=prepared.task.compute_dtype)
    program = make_program(dataclasses.replace(experiment, mesh=prepared.experiment.mesh), task)
    changed = CompiledStep(
        program, step.placement, prepared.data.batch_axes(task), shapes_allowed=step.shapes_allowed + 1
    )
    _check_same_state(step.program.abstract, changed.program.abstract)
    return changed, lines


def _check_same_state(before: TrainState, after: TrainState) -> None:
    def shapes(state: TrainState) -> dict[str, str]:
        return {name: f"{leaf.dtype}{list(leaf.shape)}" for name, leaf in named_leaves(state).items()}

    first, second = shapes(before), shapes(after)
    for name in sorted(first.keys() | second.keys()):
        if first.get(name) != second.get(name):
            raise RecipeError(
                f"with these settings the state has {name} as {second.get(name, 'nothing')}, and the run's has "
                f"{first.get(name, 'nothing')}: the step can't be taken from the run's state"
            )


def _of_fewer_rows(replay: ReplayedStep, step: CompiledStep) -> CompiledStep:
    """Return a step for batches of fewer rows, which come with their numbers."""
    axes = replay.prepared.data.batch_axes(step.program.task)
    return CompiledStep(
        step.program, step.placement, {**axes, **batch_row_axes({ROW_LEAF: np.zeros(1)})}, shapes_allowed=1
    )


def _without(step: CompiledStep, batch: Mapping[str, Any], rows: Sequence[int]) -> dict[str, jax.Array]:
    """Leave rows out of a batch: remove them, or set their loss mask to 0 if the mesh does not take fewer rows.

    Raises:
        RecipeError: A row does not exist, or can't be left out.
    """
    count = len(next(iter(batch.values())))
    for row in rows:
        if not 0 <= row < count:
            raise RecipeError(f"row {row}; expected one of the batch's {count} rows, 0 to {count - 1}")
    if len(set(rows)) == count:
        raise RecipeError(f"all {count} rows are left out; leave one in at least")
    host = jax.device_get(dict(batch))
    if MASK_LEAF in host:
        mask = np.array(host[MASK_LEAF])
        mask[list(rows)] = 0
        return step.put({**host, MASK_LEAF: mask})
    # With their numbers, from which random bits of a row are drawn.
    host.setdefault(ROW_LEAF, np.arange(count, dtype=np.int32))
    try:
        return step.put({name: np.delete(leaf, list(rows), axis=0) for name, leaf in host.items()})
    except LayoutError as error:
        raise RecipeError(
            f"without {len(set(rows))} of {count} rows the batch can't be divided over the devices ({error}); leave out more rows"
        ) from error


def _relative_difference(replay: ReplayedStep, state: TrainState) -> float:
    """Return the norm of the difference of two updates over the norm of the run's update."""

    def squares(first: TrainState, second: TrainState) -> float:
        pairs = zip(jax.tree.leaves(first.params), jax.tree.leaves(second.params))
        return sum(float(np.sum((np.asarray(a, np.float64) - np.asarray(b, np.float64)) ** 2)) for a, b in pairs)

    update = squares(replay.after, replay.before)
    return float(np.sqrt(squares(state, replay.after) / update)) if update else float("nan")
