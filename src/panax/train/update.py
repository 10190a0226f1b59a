"""The training step as a pure function: gradients, clipping, the guard, the update."""

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import optax

from ..comms import Comms
from ..comms.delayed import Terms
from ..comms.reduction import Owed
from ..core import (
    Batch,
    CollectingTask,
    DataChecks,
    Gradients,
    StepGuard,
    Task,
    TrainState,
    current_target,
    pair_axes,
    total_loss,
)
from ..core.errors import RecipeError, TrainingError
from ..core.leaf_ranges import NUMBER, find_faults, skip_masked_rows, widen
from ..core.logical import axes_of_rows
from ..core.measures import Losses, Metrics, is_reserved
from ..core.validated import Validated
from ..kernels.precision import accumulation_dtype
from ..optim.clipping import clipped_by_layer
from ..optim.transformation import Transformation, apply_updates
from .freezing import Rows, mask_frozen_layers
from .loss_scaling import check_settings, holds_back, next_scale
from .on_mesh import BatchAxes
from .on_mesh import evaluation as evaluation_on_mesh
from .on_mesh import gradients as gradients_on_mesh
from .precision import matmuls_as_set
from .tables import TableUpdates, scale_rows, table_norm, with_tables

Scalars = Mapping[str, Any]


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepConfig(Validated):
    """How one update is made from one global batch.

    Attributes:
        micro_batches: The batch is worked off in this many parts, one after the other, for less memory.
        pad_rows: Fill a batch whose rows don't divide over the devices and parts up with rows that count nothing, where its leaf
            `loss_mask` says which count. Without it such a batch is an error.
        clip_norm: The whole gradient is scaled down to this norm where it is larger; None leaves it.
        clip_layer_norm: Then the gradient of each layer's own array, to this norm; of parameters that are not tables, as is the
            next.
        clip_ratio: Then the gradient of what goes into each output, to this share of the norm of its weights (adaptive clipping,
            arXiv:2102.06171), usually 0.01; of norms and biases as wholes.
        spike_factor: An update whose gradient norm is above this many times the running mean is skipped; None never.
        max_skipped: The run stops with an error after this many skipped updates in a row.
        ema_decay: Keep an exponential moving average of the parameters with this decay, and evaluate and export that; None keeps
            none. After n updates, those that an agent's early stop left out included, the decay is at most (1 + n) / (10 + n), so
            that the first parameters are soon forgotten.
            Tables are not averaged: that would read and write all of them in each step.
        loss_scale: What the loss of a task that computes in float16 is multiplied with at first, a power of two; None for
            2 ** 15. It is halved where gradients are not finite; such a step counts towards `max_skipped` only once it is 1.
        loss_scale_steps: After so many updates it is doubled; None for 2,000.
        check_sums: Follow what each device holds of every value of the traced step, and raise an error where a task that names
            its axes forgets a sum over devices, or makes one too many. Costs a few percent of tracing.
    """

    micro_batches: int = 1
    pad_rows: bool = False
    clip_norm: float | None = 1.0
    clip_layer_norm: float | None = None
    clip_ratio: float | None = None
    spike_factor: float | None = None
    max_skipped: int = 10
    ema_decay: float | None = None
    loss_scale: float | None = None
    loss_scale_steps: int | None = None
    check_sums: bool = True

    def __post_init__(self) -> None:
        if self.micro_batches < 1:
            raise RecipeError(f"step.micro_batches={self.micro_batches}; expected 1 or more")
        for name in ("clip_norm", "clip_layer_norm", "clip_ratio"):
            value = getattr(self, name)
            if value is not None and value <= 0:
                raise RecipeError(f"step.{name}={value}; expected a positive number, or None")
        if self.max_skipped < 1:
            raise RecipeError(f"step.max_skipped={self.max_skipped}; expected 1 or more")
        if self.spike_factor is not None and self.spike_factor <= 1:
            raise RecipeError(f"step.spike_factor={self.spike_factor}; expected a factor above 1, or None")
        check_settings(self.loss_scale, self.loss_scale_steps)
        if self.ema_decay is not None and not 0 < self.ema_decay < 1:
            raise RecipeError(f"step.ema_decay={self.ema_decay}; expected a decay in (0, 1), such as 0.999, or None")


def gradient_step(
    state: TrainState,
    batch: Batch,
    *,
    task: Task,
    trainable: Any,
    config: StepConfig,
    batch_axes: BatchAxes | None = None,
    comms: Comms | None = None,
    tables: TableUpdates | None = None,
) -> tuple[Gradients, Owed, Terms | None]:
    """The gradients of one global batch, and what compressed sums owe after them; arguments as of `train_step`.

    Where gradients are one step late, they are those of the last batch, and the terms of this one come third.
    """
    prepared = prepare_batch(task, batch, batch_axes)
    batch, axes = prepared.batch, prepared.axes
    late = state.delayed if comms is not None else None
    with matmuls_as_set(task, current_target()):
        found, left, terms = gradients_on_mesh(
            task,
            state.params if late is None else late.ahead(state.params, trainable),
            state.model_state,
            batch,
            state.step_key,
            trainable,
            config.micro_batches,
            axes,
            state.guard.scale,
            comms,
            state.owed,
            None if comms is None else state.step,
            None if late is None else late.terms,
            tables,
        )
    return found._replace(metrics={**found.metrics, **prepared.faults}), left, terms


PARAMETER_NORM = "parameter_norm"

MEASURES = "measures"
"""Among a step's scalars, its losses and metrics as sums, if they were asked for."""

NORM_MEMORY = 0.98
"""Decay of the running mean of gradient norms: it remembers about 50 steps."""


def train_step(
    state: TrainState,
    batch: Batch,
    *,
    task: Task,
    trainable: Any,
    transformation: Transformation,
    learning_rate: optax.Schedule | None,
    config: StepConfig,
    batch_axes: BatchAxes | None = None,
    resting: Rows | None = None,
    comms: Comms | None = None,
    tables: TableUpdates | None = None,
    measures: bool = False,
) -> tuple[TrainState, Scalars]:
    """Take one step.

    An update that is not finite, that spikes, or of a batch in which nothing counts leaves parameters, state and moments as they
    were.

    Args:
        batch: The global batch; the leaf `row` is added to it.
        trainable: A tree of bools like the parameters.
        learning_rate: Step to rate, to be reported; None where the optimizer does not tell its own.
        batch_axes: The logical axes of each leaf of the batch; by default rows alone are split.
        resting: Of stacked parameters, the layers that are frozen: they count in no norm, and no update moves them.
        comms: How gradients are added up over the slow network, where they are compressed.
        tables: Those among the parameters, whose gradients are rows and whose update is their own.
        measures: Return the losses and metrics as sums too, under `MEASURES`, for who merges them with those of other steps.

    Returns:
        The next state, and scalars: `loss`, each loss and metric by name, `gradient_norm`, `parameter_norm` (of those that
        train, tables apart, after the update), `learning_rate`, `skipped`,
        `loss_scale` where there is one; and what checks of the data found (`DataChecks`), where the task makes any.
    """
    result, owed, terms = gradient_step(
        state, batch, task=task, trainable=trainable, config=config, batch_axes=batch_axes, comms=comms, tables=tables
    )
    late = state.delayed
    result = result._replace(gradients=mask_frozen_layers(result.gradients, resting))
    loss = total_loss(result.losses)
    norm = optax.tree.norm(jax.tree.map(lambda g: g.astype(accumulation_dtype(g.dtype)), result.gradients))
    norm = table_norm(norm, result.rows)
    check_names(result.metrics)
    teaches = _teaches(result) & jnp.isfinite(loss)
    finite = jnp.isfinite(norm) & (jnp.isfinite(loss) if late is None else True)
    applied = finite & (teaches if late is None else late.teaches) & _is_usual(norm, state.guard, config)
    behind = 0 if late is None else late.begun.astype(jnp.int32)
    rate = None if learning_rate is None else _scheduled(learning_rate, state.step - state.guard.skipped - behind)
    if rate is not None:
        applied &= jnp.isfinite(rate)
    guard = _next_guard(state.guard, applied, finite, norm, config)
    if late is not None:
        # The first step has no gradient yet, which is no update that was skipped.
        guard = jax.tree.map(functools.partial(jnp.where, late.begun), guard, state.guard)
    scalars = scalars_of(result.losses, result.metrics, task.num_runs) | {
        "loss": loss / task.num_runs,
        "gradient_norm": norm,
    }
    if measures:
        scalars[MEASURES] = {"losses": dict(result.losses), "metrics": dict(result.metrics)}
    if rate is not None:
        scalars["learning_rate"] = rate
    if guard.scale is not None:
        scalars["loss_scale"] = guard.scale
    scalars |= {"skipped": guard.skipped, "skipped_in_a_row": guard.skipped_in_a_row}
    free, frozen = eqx.partition(state.params, trainable if tables is None else tables.without(trainable))

    def updated() -> _Guarded:
        gradients = result.gradients
        if config.clip_norm is not None:
            scale = _clip_factor(norm, config.clip_norm)
            gradients = jax.tree.map(lambda g: g * scale.astype(g.dtype), gradients)
        if config.clip_layer_norm is not None or config.clip_ratio is not None:
            axes, meanings = (
                {name: axes for name, _, axes in pair_axes(state.params, each)}
                for each in (task.parameter_axes(state.params), task.meaning_axes(state.params))
            )
            limits = (config.clip_layer_norm, config.clip_ratio)
            gradients = clipped_by_layer(gradients, free, axes, *limits, meanings)
        more = {"value": loss} if transformation.takes_loss else {}
        updates, optimizer_state = transformation.update(gradients, state.optimizer_state, free, **more)
        params = apply_updates(free, mask_frozen_layers(updates, resting))
        averaged = None
        if config.ema_decay is not None:
            averaged = _averaged(state.averaged, params, config.ema_decay, guard, state.step)
        elif transformation.averaged is not None:
            averaged = mask_frozen_layers(transformation.averaged(params, optimizer_state), resting, params)
        return _Guarded(params, result.state, optimizer_state, averaged, owed)

    old = _Guarded(free, state.model_state, state.optimizer_state, state.averaged, state.owed)
    chosen = _either(applied, updated, old)
    if late is not None:
        model_state = jax.tree.map(functools.partial(jnp.where, teaches), result.state, state.model_state)
        chosen = chosen._replace(model_state=model_state)
        late = late.after(terms or {}, teaches, free, chosen.params)
    if not isinstance(task, CollectingTask):
        scalars[PARAMETER_NORM] = parameter_norm(chosen.params)
    params, kept = eqx.combine(chosen.params, frozen), state.tables
    if tables is not None and kept is not None and result.rows is not None:
        rows = (
            result.rows if config.clip_norm is None else scale_rows(result.rows, _clip_factor(norm, config.clip_norm))
        )
        count = state.step - state.guard.skipped
        changed, kept = tables.updated(params, kept, rows, updates=count, applied=applied)
        params = with_tables(params, changed)
    next_state = TrainState(
        step=state.step + 1,
        params=params,
        model_state=chosen.model_state,
        optimizer_state=chosen.optimizer_state,
        key=state.key,
        guard=guard,
        averaged=chosen.averaged,
        owed=chosen.owed,
        delayed=late,
        tables=kept,
    )
    return next_state, scalars


def check_names(metrics: Metrics) -> None:
    """Refuse a metric with a name of the step's own: one of the two figures would be lost, and `loss` chooses checkpoints.

    Raises:
        RecipeError: Names it.
    """
    for name in metrics:
        if is_reserved(name):
            raise RecipeError(
                f"the task reports a metric {name!r}, which is the name of what the step itself reports; give it another name, "
                f"such as {'my_' + name.replace('/', '_')!r}"
            )


def parameter_norm(params: Any) -> jax.Array:
    """The norm of all parameters: infinite or NaN if one is, after an update that was."""
    return optax.tree.norm(jax.tree.map(lambda p: p.astype(accumulation_dtype(p.dtype)), params)).astype(jnp.float32)


def check_sound(number: int, scalars: Mapping[str, Any]) -> None:
    """Raise an error if an optimizer's update was not finite though the loss and its gradient were; before anything is saved.

    Args:
        number: The step's.
        scalars: Of the step; waits for the devices.

    Raises:
        TrainingError: The learning rate is not finite, or the parameters are not any more.
    """
    rate, norm = (float(scalars.get(name, 0.0)) for name in ("learning_rate", PARAMETER_NORM))
    if not math.isfinite(rate):
        raise TrainingError(
            f"step {number}: the learning rate of this update is {rate}; look at optimizer.schedule, whose function is asked for "
            f"update 0 first. Nothing was updated"
        )
    if not math.isfinite(norm):
        raise TrainingError(
            f"step {number}: the parameters are not finite after this update (their norm is {norm}), though the loss and its "
            f"gradient were; lower optimizer.schedule.peak, and look at optimizer.epsilon and at what the optimizer divides "
            f"by. The run ends before it saves them: go on from its last checkpoint"
        )


def _clip_factor(norm: jax.Array, most: float) -> jax.Array:
    return jnp.minimum(1.0, most / (norm + 1e-6))


def _teaches(result: Gradients) -> jax.Array:
    """Whether anything counted in a batch, and no check of its data found a fault."""
    # A batch that is masked everywhere teaches nothing: without this, weight decay and old moments would still move the weights.
    teaches = functools.reduce(jnp.logical_or, [term.weight > 0 for term in result.losses.values()])
    for found in result.metrics.values():
        if isinstance(found, DataChecks):
            teaches &= ~found.any
    return teaches


def _is_usual(norm: jax.Array, guard: StepGuard, config: StepConfig) -> jax.Array | bool:
    """Whether a gradient's norm is no spike."""
    if config.spike_factor is None:
        return True
    return (guard.usual_norm == 0.0) | (norm <= config.spike_factor * guard.usual_norm)


def _next_guard(
    guard: StepGuard, applied: jax.Array, finite: jax.Array, norm: jax.Array, config: StepConfig
) -> StepGuard:
    usual = guard.usual_norm
    moved = jnp.where(usual == 0.0, norm, NORM_MEMORY * usual + (1 - NORM_MEMORY) * norm)
    counts = ~holds_back(guard, finite)
    return StepGuard(
        skipped=guard.skipped + (~applied).astype(jnp.int32),
        skipped_in_a_row=jnp.where(applied, 0, guard.skipped_in_a_row + counts.astype(jnp.int32)),
        usual_norm=jnp.where(applied, moved, usual),
        **next_scale(guard, applied, finite, config.loss_scale_steps),
    )


def scalars_of(losses: Losses, metrics: Metrics, num_runs: int = 1) -> dict[str, Any]:
    """Each loss and metric by name, a loss as the mean of all runs; what checks of the data found is left as it is."""
    means = {f"loss/{name}": term.mean / num_runs for name, term in losses.items()}
    return means | {
        name: metric if isinstance(metric, DataChecks) else metric.value for name, metric in metrics.items()
    }


class _Guarded(NamedTuple):
    """What an update that is not applied leaves as it was; parameters are the trainable ones."""

    params: Any
    model_state: Any
    optimizer_state: Any
    averaged: Any
    owed: Owed


def _either(applied: jax.Array, updated: Callable[[], _Guarded], old: _Guarded) -> _Guarded:
    """What was updated where it is applied, else what was there."""
    if current_target().traits.cheap_branches:
        return jax.lax.cond(applied, updated, lambda: old)
    return jax.tree.map(lambda n, o: jnp.where(applied, n, o), updated(), old)


def _averaged(averaged: Any, params: Any, most: float, guard: StepGuard, step: jax.Array) -> Any:
    """The average moved towards the parameters after an update."""
    updates = (step + 1 - guard.skipped).astype(jnp.float32)
    share = 1.0 - jnp.minimum(most, (1.0 + updates) / (10.0 + updates))
    return jax.tree.map(lambda a, p: a + share.astype(a.dtype) * (p.astype(a.dtype) - a), averaged, params)


def _scheduled(learning_rate: optax.Schedule, count: jax.Array) -> jax.Array:
    with jax.numpy_dtype_promotion("standard"):
        return jnp.asarray(learning_rate(count), jnp.float32)


def evaluation_step(
    state: TrainState,
    batch: Batch,
    *,
    task: Task,
    batch_axes: BatchAxes | None = None,
    tables: TableUpdates | None = None,
) -> Any:
    """The losses and metrics of one batch, unmerged, so that the division comes after the last one; of the averaged parameters,
    where there are any."""
    prepared = prepare_batch(task, batch, batch_axes)
    with matmuls_as_set(task, current_target()):
        result = evaluation_on_mesh(
            task, state.judged_params, state.model_state, prepared.batch, state.key, prepared.axes, tables
        )
    check_names(result.metrics)
    return {"losses": dict(result.losses), "metrics": {**result.metrics, **prepared.faults}}


class PreparedBatch(NamedTuple):
    """A batch as a task's `loss` takes it.

    Attributes:
        batch: With the leaf `row`, each row's index in it; ids are int32, weights float32.
        axes: The logical axes of all leaves.
        faults: The check of the leaves' ranges, as a metric; empty in a job of one process, which has checked before it sent.
    """

    batch: dict[str, Any]
    axes: BatchAxes
    faults: Mapping[str, DataChecks]


def prepare_batch(task: Task, batch: Batch, axes: BatchAxes | None = None) -> PreparedBatch:
    """Number a global batch's rows, widen its narrow integers, and check it where no process sees all of it."""
    rows = next(iter(batch.values())).shape[0]
    number = {NUMBER: batch.get(NUMBER, jnp.arange(rows, dtype=jnp.int32))}
    axes = {**(axes_of_rows(batch) if axes is None else axes), **axes_of_rows(number)}
    found = find_faults(batch, task.leaf_ranges) if jax.process_count() > 1 else None
    faults = {} if found is None else {"batch_ranges": found}
    return PreparedBatch({**skip_masked_rows(widen(batch, task.leaf_ranges), task.leaf_ranges), **number}, axes, faults)
