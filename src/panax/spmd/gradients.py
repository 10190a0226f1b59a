"""Gradients of a task's loss over micro-batches, for tasks that do not compute their own."""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp

from ..core import Batch, Evaluation, Gradients, ModelState, Params, Task, current_layout
from ..core.loss_scale import scaled_objective
from ..core.measures import Scalar, merge_stacked
from .collectives import psum_over_tokens
from .overlapped_grad_reduce import GradReduceOverlap, current_grad_reduce, overlap_grad_reduce, parameter_name
from .step_gather import split_slots


def compute_grads(
    task: Task, params: Params, state: ModelState, micro_batches: Batch, key: jax.Array, trainable: Any
) -> Gradients:
    """Return `task.gradients`, or those of `accumulate_grads` if the task does not compute its own.

    The arguments are those of `Task.gradients`.
    """
    task_gradients = task.gradients(params, state, micro_batches, key, trainable)
    return (
        accumulate_grads(task, params, state, micro_batches, key, trainable)
        if task_gradients is None
        else task_gradients
    )


def accumulate_grads(
    task: Task, params: Params, state: ModelState, micro_batches: Batch, key: jax.Array, trainable: Any
) -> Gradients:
    """Differentiate `task.loss` for each micro-batch and sum the gradients in a scan.

    On a mesh the gradients are partial sums of this device, in the layout that `train/mesh_execution.py` reduces.

    Args:
        micro_batches: Batch leaves with an additional leading axis, one entry per micro-batch, in order.
        trainable: A tree of bools with the structure of `params`.
    """
    free, frozen = eqx.partition(params, trainable)
    free, gathered = split_slots(free)
    count = jax.tree.leaves(micro_batches)[0].shape[0]
    # Each loss is divided by its total weight over all micro-batches and devices. A single micro-batch
    # without a mesh has the total weight itself; on a mesh, a device's weight is only a part of it.
    alone = count == 1 and current_layout() is None
    weights = None if alone else psum_over_tokens(dict(task.loss_weights(params, state, micro_batches, key)))

    def objective(free: Params, state: ModelState, batch: Batch) -> tuple[Scalar, Evaluation]:
        result = task.loss(eqx.combine(free, gathered, frozen), state, batch, key, True)
        return scaled_objective(result.losses, weights), result

    summing = current_grad_reduce()

    def alone_in(state: ModelState, batch: Batch) -> tuple[Params, Evaluation]:
        if summing is None or not (summing.of_each or count == 1):
            return jax.grad(objective, has_aux=True)(free, state, batch)
        return _with_sums(summing, objective, free, state, batch)

    if count == 1:
        gradients, result = alone_in(state, jax.tree.map(lambda x: x[0], micro_batches))
        return Gradients(gradients, *result)

    def accumulate(carry: tuple[Params, ModelState], batch: Batch) -> tuple[tuple[Params, ModelState], Any]:
        sums, state = carry
        gradients, result = alone_in(state, batch)
        return (jax.tree.map(jnp.add, sums, gradients), result.state), (result.losses, result.metrics)

    zeros = jax.tree.map(jnp.zeros_like, free)
    if summing is None or summing.of_each:
        (gradients, state), (losses, metrics) = jax.lax.scan(accumulate, (zeros, state), micro_batches)
    else:
        # Process the last micro-batch separately: its backward pass reduces the accumulated gradients over
        # devices.
        former, last = (jax.tree.map(lambda x, at=at: x[at], micro_batches) for at in (slice(None, -1), -1))
        with overlap_grad_reduce(None):
            (sums, state), measures = jax.lax.scan(accumulate, (zeros, state), former)
        gradients, result = _with_sums(summing, objective, free, state, last, sums)
        state = result.state
        losses, metrics = jax.tree.map(_with_last, measures, (result.losses, result.metrics))
    return Gradients(gradients, merge_stacked(losses, count), state, merge_stacked(metrics, count))


def _with_last(former: jax.Array, last: Any) -> jax.Array:
    return jnp.concatenate([former, jnp.asarray(last, former.dtype)[None]])


def _with_sums(
    summing: GradReduceOverlap, objective: Any, free: Params, state: ModelState, batch: Batch, added: Any = None
) -> tuple[Params, Evaluation]:
    """Compute gradients that are already reduced over devices wherever the backward pass can do so.

    Args:
        added: Accumulated gradients of the micro-batches before this one.
    """

    def followed(
        free: Params, scanned: Any, residuals: Any, state: ModelState, batch: Batch
    ) -> tuple[Scalar, Evaluation]:
        return objective(summing.track_params(free, scanned, residuals, added), state, batch)

    # Layer scans read their parameters as separate variables (`scanned`) from the rest of the loss (`free`):
    # gradients of the former are sums over devices, gradients of the latter are partial sums of this device.
    grad_outputs = jax.grad(followed, (0, 1, 2), has_aux=True)(
        free, summing.scan_params(free), summing.residuals, state, batch
    )
    (gradients, sums, residuals), result = grad_outputs
    summing.residuals = {
        name: new_residual if name in summing.received else summing.residuals[name]
        for name, new_residual in residuals.items()
    }
    leaves, structure = jax.tree_util.tree_flatten_with_path(gradients)
    before = [None] * len(leaves) if added is None else jax.tree.leaves(added)
    totals = [
        summing.total(parameter_name(path), gradient, sums, former)
        for (path, gradient), former in zip(leaves, before, strict=True)
    ]
    return structure.unflatten(totals), result
