"""A step that collects its own data and makes several updates from it, in one program."""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from ..core import Axes, Batch, CollectingTask, CollectionResult, DataChecks, TrainState, current_target
from ..core.errors import RecipeError
from ..core.layout.layout import use_global_arrays
from ..core.measures import NO_FAULT, merge_stacked
from .parts.parameter_norm import PARAMETER_NORM, parameter_norm
from .precision import use_matmul_precision
from .update import Scalars, check_names, prepare_batch

if TYPE_CHECKING:
    from .program import Program

LAST_VALUE_NAMES = ("skipped", "skipped_in_a_row", "learning_rate", "loss_scale")
"""Scalars reported as of the last update made, and the learning rate as of the next step; other scalars are
means over updates."""


class _Packed(eqx.Module):
    """Scalars of an update in one vector, since a loop would copy each separate scalar individually.

    Attributes:
        values: The float32 scalars, in the order of `names`.
        others: The remaining scalars, by name.
    """

    values: Float[Array, "*loops name"]
    others: Scalars
    names: tuple[str, ...] = eqx.field(static=True)

    @classmethod
    def of(cls, scalars: Scalars) -> "_Packed":
        def packs(value: Any) -> bool:
            return not isinstance(value, DataChecks) and value.shape == () and value.dtype == jnp.float32

        names = tuple(name for name, value in scalars.items() if packs(value))
        others = {name: value for name, value in scalars.items() if name not in names}
        return cls(jnp.stack([scalars[name] for name in names]), others, names)

    def unpacked(self) -> Scalars:
        return {**{name: self.values[..., place] for place, name in enumerate(self.names)}, **self.others}


UpdateOutcome = tuple[_Packed, jax.Array]
"""Scalars of updates, and a mask of those that were made; each with the leading axis `update`."""


def check_plain(program: "Program") -> None:
    """Check that a collecting task is not combined with features that require one update per step.

    Raises:
        RecipeError: The task is combined with such a feature; the message names the setting to remove.
    """
    renewal = program.transformation.renewal
    for is_set, setting in (
        (not program.comms.is_plain, "comms"),
        (program.tables is not None, "tables of parameters"),
        (
            renewal is not None and program.task.updates_per_step > 1,
            f"{type(program.optimizer).__name__}, which renews its state {'' if renewal is None else renewal.description}",
        ),
    ):
        if is_set:
            raise RecipeError(
                f"{type(program.task).__name__} makes {program.task.updates_per_step} updates in a step, which can't be combined "
                f"with {setting}; remove them"
            )


def take_collecting_step(
    program: "Program", state: TrainState, batch: Batch, batch_axes: Mapping[str, Axes] | None
) -> tuple[TrainState, Scalars]:
    """Repeat `rollouts_per_step` times: collect, then make `updates` updates. Scalars are means over all
    updates, or the last values (`LAST_VALUE_NAMES`)."""
    task = _task_of(program)
    numbered = prepare_batch(program.task, batch, batch_axes).batch
    step, key = state.step, state.step_key

    def collection(state: TrainState, number: jax.Array) -> tuple[TrainState, Any]:
        collection_key = jax.random.fold_in(key, number)
        collected = collect(program, state, numbered, collection_key)
        first = (step * task.rollouts_per_step + number) * task.updates
        state, scalars = _updates(program, state, collected, collection_key, first)
        return dataclasses.replace(state, step=step), (scalars, collected.metrics)

    state, (scalars, metrics) = jax.lax.scan(collection, state, jnp.arange(task.rollouts_per_step))
    merged = merge_stacked(metrics, task.rollouts_per_step)
    metric_values = {
        name: metric if isinstance(metric, DataChecks) else metric.value for name, metric in merged.items()
    }
    check_names(merged)
    norm = {PARAMETER_NORM: parameter_norm(eqx.filter(state.params, program.trainable))}
    return dataclasses.replace(state, step=step + 1), _over_updates(scalars) | metric_values | norm


def collect(program: "Program", state: TrainState, batch: Batch, key: jax.Array) -> CollectionResult:
    """Collect the task's data with the parameters of `state`."""
    task = _task_of(program)
    task.check_rows(batch)
    with use_matmul_precision(task, current_target()), use_global_arrays():
        return task.collect(state.params, state.model_state, batch, key)


def first_batch(program: "Program", state: TrainState, batch: Batch) -> tuple[TrainState, Batch]:
    """Return the batch of the first update of the step after `state`, with the state that this update
    sees."""
    task, key = _task_of(program), jax.random.fold_in(state.step_key, 0)
    collected = collect(program, state, prepare_batch(program.task, batch).batch, key)
    minibatch = task.minibatch(collected.experience, collected.state, jnp.int32(0), key)
    first = state.step * task.updates_per_step
    return dataclasses.replace(state, model_state=collected.state, step=first), minibatch


def _updates(
    program: "Program", state: TrainState, collected: CollectionResult, key: jax.Array, first: jax.Array
) -> tuple[TrainState, UpdateOutcome]:
    """Make all updates of one collection; return their scalars, and a mask of those that were made.

    Args:
        first: Number of the first of these updates in the run.
    """
    task = _task_of(program)

    def update(carry: tuple[TrainState, jax.Array], index: jax.Array) -> Any:
        state, going = carry
        with use_global_arrays():
            minibatch = task.minibatch(collected.experience, state.model_state, index, key)
        after, scalars = program.one_step(dataclasses.replace(state, step=first + index), minibatch, None)
        followed = task.update_state(after.params, after.model_state)
        after = dataclasses.replace(after, model_state=followed, step=state.step)
        if task.may_stop_early:
            going &= task.should_continue(scalars)
            after = jax.tree.map(lambda new, old: jnp.where(going, new, old), after, state)
        return (after, going), (_Packed.of(scalars), going)

    def updates(initial: TrainState) -> tuple[TrainState, UpdateOutcome]:
        (state, _), outcome = jax.lax.scan(update, (initial, jnp.bool_(True)), jnp.arange(task.updates))
        skipped = program.transformation.on_skipped_step
        if task.may_stop_early and skipped is not None:
            # Advance the schedule by the omitted updates, which the run's total number of updates includes.
            left_out = task.updates - outcome[1].sum(dtype=jnp.int32)
            state = dataclasses.replace(state, optimizer_state=skipped(state.optimizer_state, left_out))
        return state, outcome

    initial = dataclasses.replace(state, model_state=dict(collected.state))
    faults = [metric.has_failed for metric in collected.metrics.values() if isinstance(metric, DataChecks)]
    state, outcome = _unless(faults, updates, initial) if faults else updates(initial)
    return dataclasses.replace(state, model_state={**collected.kept, **state.model_state}), outcome


def _unless(faults: list[jax.Array], updates: Callable[[TrainState], Any], initial: TrainState) -> Any:
    """Run the updates; if a fault was found in the data, return the initial state and scalars of no weight."""
    has_fault = functools.reduce(jnp.logical_or, faults)
    shapes = jax.eval_shape(updates, initial)[1]

    def none(outcome: Any) -> Any:
        if isinstance(outcome, DataChecks):
            return DataChecks(
                jnp.full(outcome.worst.shape, NO_FAULT, outcome.worst.dtype), outcome.checks, outcome.advice
            )
        return jnp.zeros(outcome.shape, outcome.dtype)

    nothing = jax.tree.map(none, shapes, is_leaf=lambda made: isinstance(made, DataChecks))
    if current_target().traits.cheap_branches:
        return jax.lax.cond(has_fault, lambda: (initial, nothing), lambda: updates(initial))
    return jax.tree.map(lambda new, old: jnp.where(has_fault, old, new), updates(initial), (initial, nothing))


def _over_updates(outcome: UpdateOutcome) -> dict[str, Any]:
    """Reduce the scalars of updates [collection, update] to those of the step; updates that were not made
    have no weight."""
    scalars, counted = outcome[0].unpacked(), outcome[1]
    weight = jnp.maximum(counted.sum(), 1).astype(jnp.float32)
    flat = counted.reshape(-1)
    last = jnp.where(flat.any(), flat.size - 1 - jnp.argmax(flat[::-1]), flat.size - 1)

    def one(name: str, value: Any) -> Any:
        if isinstance(value, DataChecks):
            return DataChecks(value.worst.max(axis=(0, 1)), value.checks, value.advice)
        if name in LAST_VALUE_NAMES:
            return value[-1, -1] if name == "learning_rate" else value.reshape(-1)[last]
        mask = counted.reshape(counted.shape + (1,) * (value.ndim - counted.ndim))
        return jnp.where(mask, value, 0).sum(axis=(0, 1)) / weight

    reduced = {name: one(name, value) for name, value in scalars.items()}
    return reduced | {"updates": counted.sum().astype(jnp.float32)}


def _task_of(program: "Program") -> CollectingTask:
    assert isinstance(program.task, CollectingTask)
    return program.task
