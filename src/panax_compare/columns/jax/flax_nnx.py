"""Flax NNX in the style of its guides: modules, `nnx.Optimizer`, `nnx.jit`."""

from typing import Any

import jax.numpy as jnp
import optax
from flax import nnx

from ...workload.compared_work import ComparedWork, use_weight_decay
from .. import RunningColumn
from .jax_device import make_running_column, set_precision
from .optax_optimizer import make_optimizer


def prepare(work: ComparedWork) -> RunningColumn:
    """Prepare a step that computes gradients and updates a module in place."""
    set_precision(work.precision)
    compute, stored = jnp.dtype(work.precision.computed), jnp.dtype(work.precision.stored)
    if work.family == "vit":
        from .flax_vit import build, names
    else:
        from .flax_decoder import build, names
    config = work.config()
    model = build(config, compute, stored, work.attention == "fused")
    tensors = work.tensors()
    state = nnx.state(model, nnx.Param)
    where: dict[Any, Any] = dict(names(config))
    decayed = {}
    for path, leaf in nnx.to_flat_state(state):
        name, change = where[path]
        leaf.set_value(jnp.asarray(change(tensors[name]), stored).reshape(leaf.shape))
        decayed[path] = use_weight_decay(name)
    nnx.update(model, state)
    mask = nnx.from_flat_state([(path, decayed[path]) for path, _ in nnx.to_flat_state(state)])
    optimizer = nnx.Optimizer(model, make_optimizer(work.optimizer, mask), wrt=nnx.Param)

    def loss_of(model, batch):
        inputs = batch["image"] if "image" in batch else batch["tokens"]
        labels = batch["label"] if "image" in batch else batch["targets"]
        logits = model(inputs).astype(jnp.float32)
        return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()

    @nnx.jit(donate_argnums=(0, 1))
    def train_step(model, optimizer, batch):
        loss, gradients = nnx.value_and_grad(loss_of)(model, batch)
        optimizer.update(model, gradients)
        return loss

    evaluate = nnx.jit(loss_of)
    return make_running_column(
        work, lambda batch: train_step(model, optimizer, batch), lambda batch: evaluate(model, batch)
    )
