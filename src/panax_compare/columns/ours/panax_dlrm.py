"""Panax's DLRM, with the weights of the same file."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import panax
from panax.core.measures import total_loss
from panax.layers import FeatureConfig, TableConfig, TablesConfig
from panax.layers.tables.mixed_rows import mix_rows
from panax.models import DlrmConfig, DlrmTask
from panax.optim import Optax, Optimizer, RowAdagrad, RowOptimizer, RowSgd, Schedule, Sgd
from panax.train import StepConfig

from ...workload.compared_work import ComparedWork
from .. import RunningColumn
from ..jax.jax_device import make_running_column, set_precision


def prepare(work: ComparedWork) -> RunningColumn:
    """Prepare a step: a task from the shape, `compile_step`, the file's weights."""
    set_precision(work.precision)
    task, example = task_of(work), work.batches()[0]
    dense, rows = optimizers_of(work)
    stepper = panax.compile_step(
        task,
        example,
        dense,
        embedding_optimizer=rows,
        config=StepConfig(clip_norm=None),
        axes={name: task.batch_axes[name] for name in example},
        devices=jax.devices()[:1],
    )
    state = stepper.init(work.seed)
    state = dataclasses.replace(state, params=load_parameters(state.params, work))

    def step(batch: Any) -> Any:
        nonlocal state
        state, scalars = stepper.compiled(state, batch)
        return scalars["loss"]

    def evaluate(batch: Any) -> Any:
        return total_loss(stepper.compiled.evaluate(state, batch)["losses"])

    return make_running_column(work, step, evaluate, stepper.compiled.put)


def task_of(work: ComparedWork) -> DlrmTask:
    config = work.config()
    shapes = zip(config["rows"], config["capacities"], strict=True)
    tables = tuple(
        TableConfig(
            name=f"c{number}",
            rows=rows,
            width=config["width"],
            features=(FeatureConfig(leaf=f"c{number}", capacity=capacity),),
        )
        for number, (rows, capacity) in enumerate(shapes, 1)
    )
    *bottom, _ = config["bottom"]
    *top, _ = config["top"]
    model = DlrmConfig(
        tables=TablesConfig(tables=tables), numeric=config["numeric"], bottom=tuple(bottom), top=tuple(top)
    )
    return DlrmTask(model=model)


def optimizers_of(work: ComparedWork) -> tuple[Optimizer, RowOptimizer]:
    """Return the optimizers of the perceptrons and of the tables."""
    rate = work.optimizer.learning_rate
    schedule = Schedule(peak=rate, decay="constant")
    if work.optimizer.name == "sgd":
        return Sgd(schedule=schedule), RowSgd(schedule=schedule)
    return Optax(transformation=adagrad(rate)), RowAdagrad(schedule=schedule)


def adagrad(rate: float, epsilon: float = 1e-10) -> optax.GradientTransformation:
    """Create the equivalent of `torch.optim.Adagrad`, which adds epsilon to the root; `optax.adagrad` adds it
    under the root."""

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        state = jax.tree.map(lambda total, g: total + g * g, state, updates)
        return jax.tree.map(lambda g, total: -rate * g / (jnp.sqrt(total) + epsilon), updates, state), state

    return optax.GradientTransformation(lambda params: jax.tree.map(jnp.zeros_like, params), update)


def load_parameters(params: Any, work: ComparedWork) -> Any:
    """Return the parameters with the file's values, each table at its position in a stack."""
    tensors = work.tensors()
    tables = params.tables
    stacks = []
    for plan, stack in zip(tables.config.stacks, tables.stacks, strict=True):
        table = np.zeros(stack.table.shape, np.float32)
        for part, offset in zip(plan.parts, plan.offsets, strict=True):
            place = mix_rows(jnp.arange(part.rows, dtype=jnp.int32) + offset, plan.rows, plan.blocks)
            table[np.asarray(place)] = tensors.pop(f"tables.{part.table.name}.weight")
        stacks.append(dataclasses.replace(stack, table=jax.device_put(table, stack.table.sharding)))

    def perceptron(module: Any, name: str) -> Any:
        layers = tuple(
            dataclasses.replace(
                layer,
                w=jnp.array(tensors[f"{name}.{number}.weight"].T),
                b=jnp.array(tensors[f"{name}.{number}.bias"]),
            )
            for number, layer in enumerate(module.layers)
        )
        return dataclasses.replace(module, layers=layers)

    return dataclasses.replace(
        params,
        tables=dataclasses.replace(tables, stacks=tuple(stacks)),
        bottom=perceptron(params.bottom, "bottom"),
        top=perceptron(params.top, "top"),
    )
