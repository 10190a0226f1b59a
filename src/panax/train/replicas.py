"""Mesh-dependent parts of a program: per-replica state, and local steps of replicas."""

import dataclasses
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import equinox as eqx
import jax
import jax.numpy as jnp

from ..comms.delayed_gradients import DelayedGradient, delayed_state_spec
from ..comms.fragments import OuterSync
from ..comms.local import (
    REPLICA,
    OuterState,
    Replicas,
    add_replica_axis,
    check_local_steps,
    merge_replica_metrics,
    replica_axes,
    sync_replicas,
)
from ..comms.residuals import check_mesh, residual_specs
from ..core import Axes, TrainState, current_layout, pair_axes
from ..core.errors import RecipeError
from ..core.layout.layout import Layout, use_layout
from ..core.measures import merge_stacked, total_loss
from ..spmd.weight_gather import check_effect as check_gathers
from .reductions.early_sum import check_sums
from .update import MEASURES, Scalars, collect_scalars, prepare_batch

if TYPE_CHECKING:
    from .program import Program


def place_program(program: "Program", layout: Layout) -> "Program":
    """Adapt a program to a mesh, adding the state that each replica holds separately.

    Raises:
        RecipeError: The settings do not fit the mesh; the message names the fix.
    """
    comms, task = program.comms, program.task
    if program.tables is not None:
        program.tables.check(task, comms, layout)
    if program.growing is not None:
        program.growing.check_mesh(layout, program.abstract.params)
    named = pair_axes(program.abstract.params, program.axes.params)
    check_gathers(layout, {name: (leaf.shape, tuple(axes)) for name, leaf, axes in named}, task)
    if comms.is_plain:
        return program
    free = {
        name: (leaf.shape, tuple(axes))
        for (name, leaf, axes), keep in zip(named, jax.tree.leaves(program.trainable))
        if keep
    }
    abstract, axes = program.abstract, program.axes
    # Local steps: each replica has its own parameters, guard and optimizer state, along a new leading axis.
    if comms.local_steps > 1 and abstract.replicas is None:
        check_local_steps(comms, layout, task, abstract.model_state)
        _check_optimizer(program)
        replicas = layout.sizes[REPLICA]
        optimizer_state = jax.eval_shape(lambda tree: add_replica_axis(tree, replicas), abstract.optimizer_state)
        abstract = _replaced(abstract, optimizer_state=optimizer_state)
        abstract = _replaced(
            abstract, replicas=jax.eval_shape(lambda state: _alike(program, state, replicas), program.abstract)
        )
        momentum = {name: axes for name, (_, axes) in free.items()}
        guard = jax.tree.map(lambda _: ("each_replica",), program.abstract.guard)
        params = replica_axes(program.abstract.params, program.axes.params)
        lies = _unflattened(abstract.replicas, Replicas, params, guard, momentum)
        axes = _replaced(
            axes, optimizer_state=replica_axes(program.abstract.optimizer_state, program.axes.optimizer_state)
        )
        axes = _replaced(axes, replicas=lies)
    check_sums(comms, task, layout)
    if comms.compress or comms.delayed:
        check_mesh(comms, free, layout, task)
    if comms.delayed:
        abstract, axes = _with_delayed(program, abstract, axes, layout)
    if comms.compress:
        residuals = residual_specs(comms, free, layout)
        abstract = _replaced(abstract, owed={name: shape for name, (shape, _) in residuals.items()} or None)
        axes = _replaced(axes, owed={name: lies for name, (_, lies) in residuals.items()} or None)
    return dataclasses.replace(program, abstract=abstract, axes=axes)


def _with_delayed(program: "Program", abstract: TrainState, axes: TrainState, layout: Layout) -> Any:
    named = pair_axes(program.abstract.params, program.axes.params)
    free = {
        name: (leaf, tuple(axes)) for (name, leaf, axes), keep in zip(named, jax.tree.leaves(program.trainable)) if keep
    }
    shapes = {name: leaf for name, (leaf, _) in free.items()}
    delayed = jax.eval_shape(lambda: DelayedGradient.initial(program.comms, shapes, layout))
    terms = {name: lies for name, (_, lies) in delayed_state_spec(program.comms, free, layout).items()}
    moved = None if delayed.moved is None else {name: lies for name, (_, lies) in free.items()}
    lies = _unflattened(delayed, DelayedGradient, terms, (), (), moved)
    return _replaced(abstract, delayed=delayed), _replaced(axes, delayed=lies)


def initial_replicas(program: "Program", state: TrainState) -> TrainState:
    """Add the initial per-replica state of the program's mesh to a state."""
    abstract = program.abstract
    if abstract.owed is not None:
        residuals = {name: jnp.zeros(leaf.shape, leaf.dtype) for name, leaf in abstract.owed.items()}
        state = dataclasses.replace(state, owed=residuals)
    if abstract.delayed is not None:
        delayed = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), abstract.delayed)
        state = dataclasses.replace(state, delayed=delayed)
    if abstract.replicas is None:
        return state
    count = jax.tree.leaves(abstract.replicas.params)[0].shape[0]
    apart = _alike(program, state, count)
    return dataclasses.replace(state, replicas=apart, optimizer_state=add_replica_axis(state.optimizer_state, count))


def take_local_step(
    program: "Program", state: TrainState, batch: Mapping[str, Any], batch_axes: Mapping[str, Axes] | None
) -> tuple[TrainState, Scalars]:
    """Take one step of each replica independently, on its own rows."""
    layout = current_layout()
    assert layout is not None and state.replicas is not None
    count = layout.sizes[REPLICA]
    # Number rows before splitting them over replicas, since dropout depends on the global row.
    prepared = prepare_batch(program.task, batch, batch_axes)
    batch, axes = prepared.batch, prepared.axes
    rows = {name: leaf.reshape(count, -1, *leaf.shape[1:]) for name, leaf in batch.items()}

    def one(params: Any, optimizer_state: Any, guard: Any, rows: Mapping[str, Any]) -> tuple[Any, ...]:
        replica_state = dataclasses.replace(
            state, params=params, optimizer_state=optimizer_state, guard=guard, replicas=None, owed=None
        )
        after, scalars = program.one_step(replica_state, rows, axes, measures=True)
        return after.params, after.optimizer_state, after.guard, scalars

    with use_layout(layout.with_local_axis(REPLICA)):
        replicas = state.replicas
        params, optimizer_state, guard, scalars = jax.vmap(one)(
            replicas.params, state.optimizer_state, replicas.guard, rows
        )
    after = dataclasses.replace(
        state,
        step=state.step + 1,
        optimizer_state=optimizer_state,
        guard=merge_replica_metrics(guard),
        replicas=Replicas(params, guard, replicas.momentum),
    )
    # Merge sums before dividing, so that each replica is weighted by its number of targets.
    measures = merge_stacked(scalars.pop(MEASURES), count)
    total = {"loss": total_loss(measures["losses"])}
    return after, merge_replica_metrics(scalars) | collect_scalars(measures["losses"], measures["metrics"]) | total


def average_params(program: "Program", state: TrainState, sync: OuterSync) -> TrainState:
    """Synchronize the replicas, and return the resulting state."""
    layout = current_layout()
    assert layout is not None and state.replicas is not None
    update = sync_replicas(
        OuterState(state.params, state.replicas, state.owed),
        state.step,
        sync,
        comms=program.comms,
        axes=program.axes.params,
        trainable=program.trainable,
        layout=layout,
    )
    return dataclasses.replace(state, params=update.params, replicas=update.replicas, owed=update.owed)


def _alike(program: "Program", state: TrainState, count: int) -> Replicas:
    names = [name for name, _, _ in pair_axes(program.abstract.params, program.axes.params)]
    leaves = zip(names, jax.tree.leaves(state.params), jax.tree.leaves(program.trainable))
    momentum = {name: jnp.zeros(leaf.shape, jnp.float32) for name, leaf, keep in leaves if keep}
    return Replicas(add_replica_axis(state.params, count), add_replica_axis(state.guard, count), momentum)


def _check_optimizer(program: "Program") -> None:
    setting, name = f"comms.local_steps={program.comms.local_steps}", type(program.optimizer).__name__
    if program.abstract.parts is not None:
        raise RecipeError(
            f"{setting}: the step part {next(iter(program.abstract.parts))} has state of its own, of which each replica would "
            f"have another; remove the part, or local steps"
        )
    if program.transformation.renewal is not None:
        raise RecipeError(
            f"{setting}: {name} renews state in a program with a single copy of it; use another optimizer"
        )
    if program.has_average:
        raise RecipeError(
            f"{setting}: each replica would have a separate average of its parameters; set step.ema_decay to None, and use an "
            f"optimizer that averages nothing"
        )


def _replaced(tree: TrainState, **fields: Any) -> TrainState:
    # Replace leaves instead of constructing, since they are not arrays.
    for field, value in fields.items():
        old = getattr(tree, field)
        tree = eqx.tree_at(
            lambda state, field=field: getattr(state, field),
            tree,
            value,
            is_leaf=lambda node, old=old: node is None or node is old,
        )
    return tree


def _unflattened(like: Any, kind: type, *parts: Any) -> Any:
    """Build an object of a class with leaves that are not arrays."""
    fields = [field.name for field in dataclasses.fields(kind)]
    leaves = [
        axes
        for name, part in zip(fields, parts)
        for axes in jax.tree.structure(getattr(like, name)).flatten_up_to(part)
    ]
    return jax.tree.structure(like).unflatten(leaves)
