"""JAX written by hand: a dictionary of arrays, a function, `jax.jit`, optax."""

import jax
import jax.numpy as jnp
import optax

from ...workload.compared_work import ComparedWork
from .. import RunningColumn
from . import plain_decoder, plain_vit
from .jax_device import make_running_column, set_precision
from .optax_optimizer import make_optimizer


def prepare(work: ComparedWork) -> RunningColumn:
    """Prepare a step of gradients and update; parameters and moments are donated."""
    set_precision(work.precision)
    model = plain_vit if work.family == "vit" else plain_decoder
    config = work.config()
    compute, stored = jnp.dtype(work.precision.computed), jnp.dtype(work.precision.stored)
    params = jax.tree.map(lambda leaf: jnp.asarray(leaf, stored), model.load(work.tensors(), config))
    optimizer = make_optimizer(work.optimizer, model.decay_mask)
    moments = optimizer.init(params)
    fused = work.attention == "fused"

    def loss_of(params, batch):
        inputs = batch["image"] if "image" in batch else batch["tokens"]
        labels = batch["label"] if "image" in batch else batch["targets"]
        logits = model.forward(params, inputs, config, compute, fused)
        return optax.softmax_cross_entropy_with_integer_labels(logits.astype(jnp.float32), labels).mean()

    def train_step(params, moments, batch):
        loss, gradients = jax.value_and_grad(loss_of)(params, batch)
        updates, moments = optimizer.update(gradients, moments, params)
        return optax.apply_updates(params, updates), moments, loss

    train_step = jax.jit(train_step, donate_argnums=(0, 1))
    evaluate = jax.jit(loss_of)

    def step(batch):
        nonlocal params, moments
        params, moments, loss = train_step(params, moments, batch)
        return loss

    return make_running_column(work, step, lambda batch: evaluate(params, batch))
