"""Panax's model, with the weights of the same file."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import panax
from panax.adapters.huggingface import config_from, load
from panax.core.measures import total_loss
from panax.kernels import Kernels
from panax.mesh import MeshShape
from panax.models import DecoderTask, VitConfig, VitTask
from panax.optim import AdamW, Optimizer, Schedule, Sgd
from panax.run import PlainStep
from panax.train import StepConfig

from ...workload.compared_work import Batch, ComparedWork
from ...workload.precision import Precision
from .. import RunningColumn
from ..jax.jax_device import make_running_column, set_precision

AXES = {"tokens": ("batch", "seq"), "targets": ("batch", "seq"), "loss_mask": ("batch", "seq")}


def prepare(work: ComparedWork) -> RunningColumn:
    """Prepare a step on one device."""
    if work.family == "dlrm":
        from . import panax_dlrm

        return panax_dlrm.prepare(work)
    return train(work, None, jax.devices()[:1])[0]


def train(work: ComparedWork, mesh: MeshShape | None, devices: list[Any]) -> tuple[RunningColumn, PlainStep]:
    """Prepare a step: a task from the folder's config.json, `compile_step`, the folder's weights."""
    set_precision(work.precision)
    task = store_in_bfloat16(task_of(work)) if work.precision is Precision.BF16 else task_of(work)
    stepper = panax.compile_step(
        task,
        add_token_mask(work, work.batches()[0]),
        optimizer_of(work),
        mesh=mesh,
        config=StepConfig(clip_norm=None),
        axes=None if work.family == "vit" else AXES,
        devices=devices,
        # Panax uses the fastest available kernel; "eager" is its reference, which stores all scores in
        # memory.
        kernels=Kernels(attention="reference" if work.attention == "eager" else "auto"),
    )
    state = stepper.init(work.seed)
    params, model_state = load(work.folder, task, state.params, state.model_state)
    state = dataclasses.replace(state, params=params, model_state=model_state)

    def step(batch):
        nonlocal state
        state, scalars = stepper.compiled(state, batch)
        return scalars["loss"]

    def evaluate(batch):
        return total_loss(stepper.compiled.evaluate(state, batch)["losses"])

    return make_running_column(
        work, step, evaluate, lambda batch: stepper.compiled.put(add_token_mask(work, batch))
    ), stepper


def task_of(work: ComparedWork) -> DecoderTask | VitTask:
    """Return the task, without the losses that other frameworks' models don't have."""
    compute = work.precision.computed
    config = config_from(work.folder)
    if isinstance(config, VitConfig):
        return VitTask(model=config, compute_dtype=compute)
    if config.feed_forward is not None:
        config = dataclasses.replace(config, feed_forward=dataclasses.replace(config.feed_forward, balance=0.0))
    return DecoderTask(model=config, compute_dtype=compute)


def store_in_bfloat16(task: DecoderTask | VitTask) -> panax.Task:
    """Return the task with parameters stored in bfloat16, which Panax never does by itself."""
    kind: Any = type(task)

    class Stored(kind):
        def init(self, key):
            params, state = super().init(key)
            return jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), params), state

    return Stored(**vars(task))


def optimizer_of(work: ComparedWork) -> Optimizer:
    """Create AdamW or SGD with the work's settings; norms and biases don't decay."""
    numbers = work.optimizer
    schedule = Schedule(peak=numbers.learning_rate, decay="constant")
    if numbers.name == "sgd":
        return Sgd(schedule=schedule)
    return AdamW(
        schedule=schedule,
        b1=numbers.b1,
        b2=numbers.b2,
        epsilon=numbers.epsilon,
        weight_decay=numbers.weight_decay,
    )


def add_token_mask(work: ComparedWork, batch: Batch) -> dict[str, Any]:
    """Add a mask that counts all tokens to a batch of tokens."""
    if work.family == "vit":
        return batch
    return {**batch, "loss_mask": np.ones(batch["tokens"].shape, np.float32)}
