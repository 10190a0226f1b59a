"""The PyTorch model of `torch_eager`, unchanged, adapted by Panax and trained on JAX."""

import time

import jax

import panax
from panax.adapters.torch import task
from panax.core.measures import total_loss
from panax.train import StepConfig

from ...workload.compared_work import ComparedWork
from .. import RunningColumn
from ..jax.jax_device import make_running_column, set_precision
from ..torch.torch_device import torch_dtype
from ..torch.torch_eager import build, compute_loss, to_tensors
from .panax_own import optimizer_of


def prepare(work: ComparedWork) -> RunningColumn:
    """Adapt the module and its loss to a task, which Panax's step trains."""
    set_precision(work.precision)
    start = time.perf_counter()
    mixed = "bfloat16" if work.precision.is_mixed else "float32"
    dtype = torch_dtype(work.precision.stored)

    def loss(module, batch):
        # Batches of bfloat16 have no NumPy arrays that PyTorch supports: images arrive in float32.
        return compute_loss(module, {name: leaf.to(dtype) if name == "image" else leaf for name, leaf in batch.items()})

    example = to_tensors(work.batches()[0])
    # Only a class token's axis is named, so that it does not decay, as in the other columns.
    axes = {"*.cls_token": (None, None, "features")} if work.family == "vit" else None
    adapted = task(build(work), loss, example, compute_dtype=mixed, sharding=axes, check=False)
    stepper = panax.compile_step(
        adapted, example, optimizer_of(work), config=StepConfig(clip_norm=None), devices=jax.devices()[:1]
    )
    tracing_seconds = time.perf_counter() - start
    state = stepper.init()

    def step(batch):
        nonlocal state
        state, scalars = stepper.compiled(state, batch)
        return scalars["loss"]

    def evaluate(batch):
        return total_loss(stepper.compiled.evaluate(state, batch)["losses"])

    def put(batch):
        return stepper.compiled.put(panax.data.loading.iterable.as_batch(to_tensors(batch)))

    note = "adapted with check=False: the comparison's own check of the losses stands for that of the adapter"
    return make_running_column(work, step, evaluate, put, tracing_seconds, (note,))
