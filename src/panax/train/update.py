"""The training step as a pure function: gradients, clipping, the skip guard, the update."""

import dataclasses
import functools
import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import optax

from ..comms.delayed_gradients import Terms
from ..comms.reduction import Residuals
from ..core import (
    Batch,
    DataChecks,
    Gradients,
    Task,
    TrainState,
    current_target,
    total_loss,
)
from ..core.batch_checks import ROW_LEAF, convert_to_32_bits, find_faults, skip_masked_rows
from ..core.errors import RecipeError, TrainingError
from ..core.measures import Losses, Metrics, is_reserved
from ..core.params.logical import batch_row_axes
from ..core.validation import Validated
from ..kernels.precision import accumulation_dtype
from .loss_scaling import check_settings
from .mesh_execution import BatchAxes, GradientInputs, GradientRule, compute_mesh_gradients, evaluate_on_mesh
from .parts.guard import next_guard
from .parts.optimizer_update import LEARNING_RATE
from .parts.parameter_norm import PARAMETER_NORM
from .parts.step_part import DenseUpdate, StepFacts, StepInputs, StepOutcome, StepPart
from .precision import use_matmul_precision
from .tables import TableUpdates

Scalars = Mapping[str, Any]
"""A step's scalars by name: losses, metrics and figures of the update."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepConfig(Validated):
    """Settings of one update from one global batch.

    Attributes:
        micro_batches: Number of parts in which the batch is processed sequentially, to save memory.
        pad_rows: Pad a batch with rows of zero weight if its rows are not divisible by devices and
            micro-batches; its leaf `loss_mask` must mark the rows that count. Otherwise such a batch is an
            error.
        clip_norm: Maximum norm of the whole gradient; a larger one is scaled down. None for no limit.
        clip_layer_norm: Maximum norm of the gradient of each layer's array, applied next; like `clip_ratio`,
            not for tables.
        clip_ratio: Maximum norm of the gradient of each output's weights, relative to the norm of these
            weights, applied last (adaptive clipping, arXiv:2102.06171), usually 0.01; norms and biases are
            clipped as a whole.
        spike_factor: Skip an update with a gradient norm above this multiple of the running mean; None to
            never skip.
        max_skipped: Stop the run with an error after this many consecutive skipped updates.
        ema_decay: Decay of an exponential moving average of the parameters, which is then evaluated and
            exported; None for no average. After n updates, including those omitted by an agent's early stop,
            the decay is at most (1 + n) / (10 + n), so that the first parameters are soon forgotten. Tables
            are not averaged: that would read and write all of them in each step.
        loss_scale: Initial loss scale of a task that computes in float16, a power of two; None for 2 ** 15.
            It is halved if gradients are not finite; such a step counts towards `max_skipped` only once the
            scale is 1.
        loss_scale_steps: Number of updates after which the scale is doubled; None for 2,000.
        check_sums: Track the sharding of every value in the traced step, and raise an error if a task that
            names its axes omits a sum over devices or has one too many. Adds a few percent to tracing.
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


def gradient_step(inputs: StepInputs, rule: GradientRule) -> tuple[Gradients, Residuals, Terms | None]:
    """Compute the gradients of one global batch.

    Returns:
        The gradients; the residuals of compressed sums; and, with delayed gradients, this batch's terms. The
        gradients are then those of the previous batch.
    """
    state = inputs.state
    prepared = prepare_batch(rule.task, inputs.batch, inputs.axes)
    late = state.delayed if rule.comms is not None else None
    arrays = GradientInputs(
        params=inputs.params,
        model_state=state.model_state,
        batch=prepared.batch,
        key=state.step_key,
        loss_scale=state.guard.scale,
        residuals=state.owed,
        step=None if rule.comms is None else state.step,
        delayed=None if late is None else late.terms,
    )
    with use_matmul_precision(rule.task, current_target()):
        gradients, left, terms = compute_mesh_gradients(rule, arrays, prepared.axes)
    return gradients._replace(metrics={**gradients.metrics, **prepared.faults}), left, terms


@dataclasses.dataclass(frozen=True, kw_only=True)
class UpdateRule:
    """How one global batch updates the state.

    Attributes:
        gradients: How its gradients are computed.
        parts: What else the step does, in its order.
        loss_scale_steps: As in `StepConfig`.
    """

    gradients: GradientRule
    parts: tuple[StepPart, ...]
    loss_scale_steps: int | None = None


MEASURES = "measures"
"""Key of a step's losses and metrics as sums among its scalars, if requested."""


def train_step(
    state: TrainState,
    batch: Batch,
    rule: UpdateRule,
    batch_axes: BatchAxes | None = None,
    *,
    measures: bool = False,
) -> tuple[TrainState, Scalars]:
    """Take one training step.

    An update leaves parameters, state and moments unchanged if it is not finite, if it is a spike, or if
    nothing in the batch counts.

    Args:
        batch: The global batch; the leaf `row` is added to it.
        batch_axes: The logical axes of each leaf of the batch; by default only rows are sharded.
        measures: True to also return the losses and metrics as sums, under `MEASURES`, for merging with those
            of other steps.

    Returns:
        The next state, and scalars: `loss`, each loss and metric by name, `gradient_norm`, `parameter_norm`
            (of the trained parameters without tables, after the update), `learning_rate`, `skipped`,
            `loss_scale` if there is one; and results of data checks (`DataChecks`), if the task has any.
    """
    inputs = StepInputs(state, batch, batch_axes, state.params, {})
    for part in rule.parts:
        inputs = part.view(inputs)
    facts = _decided(_measured(inputs, rule), rule)
    chosen = _updated(facts, rule.parts)
    frozen = eqx.filter(inputs.state.params, rule.gradients.dense_mask, inverse=True)
    following = dataclasses.replace(
        inputs.state,
        step=state.step + 1,
        params=eqx.combine(chosen.params, frozen),
        model_state=chosen.model_state,
        optimizer_state=chosen.optimizer_state,
        guard=facts.guard,
        averaged=chosen.averaged,
        owed=chosen.owed,
        parts=chosen.parts,
    )
    outcome = StepOutcome(following, chosen.params, _scalars(facts, rule.gradients.task, measures))
    for part in reversed(rule.parts):
        outcome = part.after(outcome, facts)
    return outcome.state, outcome.scalars


def _measured(inputs: StepInputs, rule: UpdateRule) -> StepFacts:
    """Compute the gradients and what decides on the update."""
    result, owed, terms = gradient_step(inputs, rule.gradients)
    for part in rule.parts:
        result = part.gradients(result)
    loss = total_loss(result.losses)
    norm = optax.tree.norm(jax.tree.map(lambda g: g.astype(accumulation_dtype(g.dtype)), result.gradients))
    check_names(result.metrics)
    teaches = _has_weight(result) & jnp.isfinite(loss)
    trained = eqx.filter(inputs.state.params, rule.gradients.dense_mask)
    facts = StepFacts(
        state=inputs.state,
        trained=trained,
        result=result,
        owed=owed,
        terms=terms,
        memos=inputs.memos,
        loss=loss,
        norm=norm,
        loss_is_finite=jnp.isfinite(loss),
        batch_teaches=teaches,
        teaches=teaches,
        guard=inputs.state.guard,
    )
    for part in rule.parts:
        facts = part.facts(facts)
    return facts


def _decided(facts: StepFacts, rule: UpdateRule) -> StepFacts:
    """Decide whether the update is applied, and advance the guard."""
    finite = jnp.isfinite(facts.norm) & facts.loss_is_finite
    applied = finite & facts.teaches & facts.usual
    for part in rule.parts:
        applied = part.decide(applied, facts)
    guard = next_guard(facts, finite, applied, rule.loss_scale_steps)
    return facts._replace(finite=finite, applied=applied, guard=guard)


def _updated(facts: StepFacts, parts: tuple[StepPart, ...]) -> DenseUpdate:
    """Return the updated state if the update is applied, otherwise the old one; a branch of `lax.cond` on targets with
    cheap branches."""
    state = facts.state
    old = DenseUpdate(
        None, facts.trained, state.model_state, state.optimizer_state, state.averaged, state.owed, state.parts
    )

    def updated() -> DenseUpdate:
        result = facts.result
        update = old._replace(gradients=result.gradients, model_state=result.state, owed=facts.owed)
        for part in parts:
            update = part.update(update, facts)
        return update._replace(gradients=None)

    if current_target().traits.cheap_branches:
        return jax.lax.cond(facts.applied, updated, lambda: old)
    return jax.tree.map(lambda new, before: jnp.where(facts.applied, new, before), updated(), old)


def _scalars(facts: StepFacts, task: Task, measures: bool) -> dict[str, Any]:
    result, guard = facts.result, facts.guard
    scalars = collect_scalars(result.losses, result.metrics, task.num_runs) | {
        "loss": facts.loss / task.num_runs,
        "gradient_norm": facts.norm,
        "skipped": guard.skipped,
        "skipped_in_a_row": guard.skipped_in_a_row,
        **facts.scalars,
    }
    if measures:
        scalars[MEASURES] = {"losses": dict(result.losses), "metrics": dict(result.metrics)}
    return scalars


def check_names(metrics: Metrics) -> None:
    """Check that no metric has a reserved name: it would collide with the step's own value, and `loss`
    selects checkpoints.

    Raises:
        RecipeError: A name is reserved; the message names it.
    """
    for name in metrics:
        if is_reserved(name):
            raise RecipeError(
                f"the task reports a metric {name!r}, a name that the step itself reports; rename it, "
                f"such as {'my_' + name.replace('/', '_')!r}"
            )


def check_finite_update(number: int, scalars: Mapping[str, Any]) -> None:
    """Check, before anything is saved, that the optimizer's update is finite if the loss and its gradient
    are.

    Args:
        number: Number of the step.
        scalars: Scalars of the step; reading them waits for the devices.

    Raises:
        TrainingError: The learning rate or the parameters are not finite.
    """
    rate, norm = (float(scalars.get(name, 0.0)) for name in (LEARNING_RATE, PARAMETER_NORM))
    if not math.isfinite(rate):
        raise TrainingError(
            f"step {number}: the learning rate of this update is {rate}; look at optimizer.schedule, which is evaluated for "
            f"update 0 first. Nothing was updated"
        )
    if not math.isfinite(norm):
        raise TrainingError(
            f"step {number}: the parameters are not finite after this update (their norm is {norm}), though the loss and its "
            f"gradient were; lower optimizer.schedule.peak, and look at optimizer.epsilon and at the optimizer's "
            f"divisors. The run ends before it saves them: resume from its last checkpoint"
        )


def _has_weight(result: Gradients) -> jax.Array:
    """Return True if the batch has any weight and its data checks found no fault."""
    # Skip a fully masked batch: otherwise weight decay and old moments would still change the weights.
    teaches = functools.reduce(jnp.logical_or, [term.weight > 0 for term in result.losses.values()])
    for found in result.metrics.values():
        if isinstance(found, DataChecks):
            teaches &= ~found.has_failed
    return teaches


def collect_scalars(losses: Losses, metrics: Metrics, num_runs: int = 1) -> dict[str, Any]:
    """Return each loss and metric by name, losses as means over all runs; results of data checks are
    unchanged."""
    means = {f"loss/{name}": term.mean / num_runs for name, term in losses.items()}
    return means | {
        name: metric if isinstance(metric, DataChecks) else metric.value for name, metric in metrics.items()
    }


def evaluation_step(
    state: TrainState,
    batch: Batch,
    *,
    task: Task,
    batch_axes: BatchAxes | None = None,
    tables: TableUpdates | None = None,
) -> Any:
    """Compute the losses and metrics of one batch as sums, to be merged over batches before dividing.

    Evaluates the averaged parameters, if there are any.
    """
    prepared = prepare_batch(task, batch, batch_axes)
    with use_matmul_precision(task, current_target()):
        result = evaluate_on_mesh(
            task, state.eval_params, state.model_state, prepared.batch, state.key, prepared.axes, tables
        )
    check_names(result.metrics)
    return {"losses": dict(result.losses), "metrics": {**result.metrics, **prepared.faults}}


class PreparedBatch(NamedTuple):
    """A batch in the form that a task's `loss` takes.

    Attributes:
        batch: With the leaf `row`, each row's index in it; ids are int32, weights float32.
        axes: The logical axes of all leaves.
        faults: Result of the leaves' range check, as a metric; empty in a single-process job, which checks
            before sending.
    """

    batch: dict[str, Any]
    axes: BatchAxes
    faults: Mapping[str, DataChecks]


def prepare_batch(task: Task, batch: Batch, axes: BatchAxes | None = None) -> PreparedBatch:
    """Add row indices to a global batch, widen narrow integers, and check it if no process sees all of it."""
    rows = next(iter(batch.values())).shape[0]
    number = {ROW_LEAF: batch.get(ROW_LEAF, jnp.arange(rows, dtype=jnp.int32))}
    axes = {**(batch_row_axes(batch) if axes is None else axes), **batch_row_axes(number)}
    found = find_faults(batch, task.leaf_ranges) if jax.process_count() > 1 else None
    faults = {} if found is None else {"batch_ranges": found}
    return PreparedBatch(
        {**skip_masked_rows(convert_to_32_bits(batch, task.leaf_ranges), task.leaf_ranges), **number}, axes, faults
    )
