"""Gradients of a task's loss over micro-batches: what a task that brings none of its own is trained by."""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp

from ..core import Batch, Evaluation, Gradients, ModelState, Params, Task, current_layout
from ..core.loss_scale import objective_of
from ..core.measures import Scalar, merge_stacked
from .collectives import psum_over_tokens
from .in_backward import GradReduceOverlap, current_grad_reduce, overlap_grad_reduce, parameter_name
from .once import split_slots


def compute_grads(
    task: Task, params: Params, state: ModelState, micro_batches: Batch, key: jax.Array, trainable: Any
) -> Gradients:
    """The gradients that a task brings itself, else `accumulate_grads`; arguments as `Task.gradients`."""
    own = task.gradients(params, state, micro_batches, key, trainable)
    return accumulate_grads(task, params, state, micro_batches, key, trainable) if own is None else own


def accumulate_grads(
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
    weights = None if alone else psum_over_tokens(dict(task.loss_weights(params, state, micro_batches, key)))

    def objective(free: Params, state: ModelState, batch: Batch) -> tuple[Scalar, Evaluation]:
        result = task.loss(eqx.combine(free, gathered, frozen), state, batch, key, True)
        return objective_of(result.losses, weights), result

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
        # The last one by itself: in its backward pass all of them are summed over devices.
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
    """Gradients of a micro-batch, and of those before it, that are summed over devices as far as the backward pass can."""

    def followed(free: Params, scanned: Any, owed: Any, state: ModelState, batch: Batch) -> tuple[Scalar, Evaluation]:
        return objective(summing.follow(free, scanned, owed, added), state, batch)

    # What scans of layers are given is another variable than what the rest of the loss reads: of one the gradient is a sum over
    # devices, of the other a device's share.
    found = jax.grad(followed, (0, 1, 2), has_aux=True)(free, summing.scanned(free), summing.owed, state, batch)
    (gradients, sums, owed), result = found
    summing.owed = {name: left if name in summing.met else summing.owed[name] for name, left in owed.items()}
    leaves, structure = jax.tree_util.tree_flatten_with_path(gradients)
    before = [None] * len(leaves) if added is None else jax.tree.leaves(added)
    whole = [
        summing.total(parameter_name(path), gradient, sums, former)
        for (path, gradient), former in zip(leaves, before, strict=True)
    ]
    return structure.unflatten(whole), result
