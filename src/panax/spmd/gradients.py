"""Gradients of a task's loss over micro-batches: what a task that brings none of its own is trained by."""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp

from ..core import Batch, Evaluation, Gradients, ModelState, Params, Task, current_layout
from ..core.loss_scale import objective_of
from ..core.measures import Scalar, merge_stacked
from .collectives import over_tokens
from .once import split_slots


def gradients_of(
    task: Task, params: Params, state: ModelState, micro_batches: Batch, key: jax.Array, trainable: Any
) -> Gradients:
    """The gradients that a task brings itself, else `accumulated`; arguments as `Task.gradients`."""
    own = task.gradients(params, state, micro_batches, key, trainable)
    return accumulated(task, params, state, micro_batches, key, trainable) if own is None else own


def accumulated(
    task: Task, params: Params, state: ModelState, micro_batches: Batch, key: jax.Array, trainable: Any
) -> Gradients:
    """Differentiate `task.loss` of each micro-batch, and add the gradients up by a scan.

    On a mesh they are this device's shares, in the layout that `train/on_mesh.py` sums them from.

    Args:
        micro_batches: Every leaf with one more leading axis, the micro-batches in order.
        trainable: A tree of bools like `params`.
    """
    free, frozen = eqx.partition(params, trainable)
    free, gathered = split_slots(free)
    count = jax.tree.leaves(micro_batches)[0].shape[0]
    # On a mesh this device's own weight is not the whole one either.
    alone = count == 1 and current_layout() is None
    weights = None if alone else over_tokens(dict(task.loss_weights(params, state, micro_batches, key)))

    def objective(free: Params, state: ModelState, batch: Batch) -> tuple[Scalar, Evaluation]:
        result = task.loss(eqx.combine(free, gathered, frozen), state, batch, key, True)
        return objective_of(result.losses, weights), result

    differentiate = jax.grad(objective, has_aux=True)
    if count == 1:
        gradients, result = differentiate(free, state, jax.tree.map(lambda x: x[0], micro_batches))
        return Gradients(gradients, *result)

    def accumulate(carry: tuple[Params, ModelState], batch: Batch) -> tuple[tuple[Params, ModelState], Any]:
        sums, state = carry
        gradients, result = differentiate(free, state, batch)
        return (jax.tree.map(jnp.add, sums, gradients), result.state), (result.losses, result.metrics)

    zeros = jax.tree.map(jnp.zeros_like, free)
    (gradients, state), (losses, metrics) = jax.lax.scan(accumulate, (zeros, state), micro_batches)
    return Gradients(gradients, merge_stacked(losses, count), state, merge_stacked(metrics, count))
