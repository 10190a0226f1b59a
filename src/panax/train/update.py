"""The training step as a pure function: gradients, clipping, the guard, the update."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import optax

from ..core import Batch, Guard, Task, TrainState, current_layout, total_loss
from ..core.errors import RecipeError

Scalars = Mapping[str, jax.Array]


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepConfig:
    """How one update is made from one global batch.

    Attributes:
        micro_batches: The batch is worked off in this many parts, one after the other, for less memory.
        clip_norm: The whole gradient is scaled down to this norm where it is larger; None leaves it.
        spike_factor: An update whose gradient norm is above this many times the running mean is skipped; None never.
        max_skipped: The run stops with an error after this many skipped updates in a row.
    """

    micro_batches: int = 1
    clip_norm: float | None = 1.0
    spike_factor: float | None = None
    max_skipped: int = 10

    def __post_init__(self) -> None:
        if self.micro_batches < 1:
            raise RecipeError(f"step.micro_batches={self.micro_batches}; expected 1 or more")
        if self.clip_norm is not None and self.clip_norm <= 0:
            raise RecipeError(f"step.clip_norm={self.clip_norm}; expected a positive norm, or None")
        if self.spike_factor is not None and self.spike_factor <= 1:
            raise RecipeError(f"step.spike_factor={self.spike_factor}; expected a factor above 1, or None")


NORM_MEMORY = 0.98
"""Decay of the running mean of gradient norms: it remembers about 50 steps."""


def train_step(
    state: TrainState,
    batch: Batch,
    *,
    task: Task,
    trainable: Any,
    transformation: optax.GradientTransformation,
    learning_rate: optax.Schedule,
    config: StepConfig,
) -> tuple[TrainState, Scalars]:
    """Take one step. An update that is not finite, or that spikes, leaves parameters, state and moments as they were.

    Args:
        batch: The global batch; the leaf `row` is added to it.
        trainable: A tree of bools like the parameters.

    Returns:
        The next state, and scalars: `loss`, each loss and metric by name, `gradient_norm`, `learning_rate`, `skipped`.
    """
    micro_batches = split_rows(number_rows(batch), config.micro_batches)
    result = task.gradients(state.params, state.model_state, micro_batches, state.step_key, trainable)
    loss = total_loss(result.losses)
    norm = optax.tree.norm(result.gradients)
    usual = state.guard.usual_norm
    applied = jnp.isfinite(norm) & jnp.isfinite(loss)
    if config.spike_factor is not None:
        applied &= (usual == 0.0) | (norm <= config.spike_factor * usual)
    gradients = result.gradients
    if config.clip_norm is not None:
        scale = jnp.minimum(1.0, config.clip_norm / (norm + 1e-6))
        gradients = jax.tree.map(lambda g: g * scale.astype(g.dtype), gradients)
    free, frozen = eqx.partition(state.params, trainable)
    updates, optimizer_state = optimizer_update(transformation, gradients, state.optimizer_state, free)
    updated = optax.apply_updates(free, updates)

    def choose(new: Any, old: Any) -> Any:
        return jax.tree.map(lambda n, o: jnp.where(applied, n, o), new, old)

    guard = Guard(
        skipped=state.guard.skipped + (~applied).astype(jnp.int32),
        skipped_in_a_row=jnp.where(applied, 0, state.guard.skipped_in_a_row + 1),
        usual_norm=jnp.where(
            applied, jnp.where(usual == 0.0, norm, NORM_MEMORY * usual + (1 - NORM_MEMORY) * norm), usual
        ),
    )
    scalars = {
        "loss": loss,
        **{f"loss/{name}": term.mean for name, term in result.losses.items()},
        **{name: metric.value for name, metric in result.metrics.items()},
        "gradient_norm": norm,
        "learning_rate": _scheduled(learning_rate, state.step - state.guard.skipped),
        "skipped": guard.skipped,
        "skipped_in_a_row": guard.skipped_in_a_row,
    }
    next_state = TrainState(
        step=state.step + 1,
        params=eqx.combine(choose(updated, free), frozen),
        model_state=choose(result.state, state.model_state),
        optimizer_state=choose(optimizer_state, state.optimizer_state),
        key=state.key,
        guard=guard,
    )
    return next_state, scalars


def _scheduled(learning_rate: optax.Schedule, count: jax.Array) -> jax.Array:
    with jax.numpy_dtype_promotion("standard"):
        return jnp.asarray(learning_rate(count), jnp.float32)


def evaluation_step(state: TrainState, batch: Batch, *, task: Task) -> Any:
    """The losses and metrics of one batch, unmerged, so that the division comes after the last one."""
    result = task.loss(state.params, state.model_state, number_rows(batch), state.key, False)
    return {"losses": dict(result.losses), "metrics": dict(result.metrics)}


def number_rows(batch: Batch) -> dict[str, Any]:
    """The batch with the leaf `row`: each row's index, laid out like the rows."""
    first = next(iter(batch.values()))
    layout = current_layout()
    spec = None if layout is None else layout.compute_spec(("batch",))
    return {**batch, "row": jax.lax.broadcasted_iota(jnp.int32, (first.shape[0],), 0, out_sharding=spec)}


def split_rows(batch: Batch, parts: int) -> dict[str, Any]:
    """Every leaf with a new first axis of micro-batches; row r goes to part r % parts, so no row changes its device."""

    def one(leaf: jax.Array) -> jax.Array:
        if parts == 1:
            return leaf[None]
        return jnp.moveaxis(leaf.reshape(leaf.shape[0] // parts, parts, *leaf.shape[1:]), 1, 0)

    return {name: one(leaf) for name, leaf in batch.items()}


def optimizer_update(
    transformation: optax.GradientTransformation, gradients: Any, state: Any, params: Any
) -> tuple[Any, Any]:
    """`transformation.update` on any mesh: inside, sharding is automatic, so that no optax code needs to know of it."""

    def update(gradients: Any, state: Any, params: Any) -> tuple[Any, Any]:
        return transformation.update(gradients, state, params)

    if current_layout() is None:
        return update(gradients, state, params)
    shardings = jax.tree.map(lambda x: jax.typeof(x).sharding, (params, state))
    return jax.sharding.auto_axes(update, out_sharding=shardings)(gradients, state, params)  # pyright: ignore[reportCallIssue]
