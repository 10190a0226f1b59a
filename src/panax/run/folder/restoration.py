"""Restore of a checkpoint's state into a run with different auxiliary state (averages, residuals, replicas)
than the one that saved it."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp

from ...checkpoint import Checkpoint
from ...comms.local import add_replica_axis
from ...comms.residuals import reshard_residual
from ...core import TrainState, named_leaves, pair_axes
from ...core.state import init_averages
from ...train import CompiledStep
from ..preparation import PreparedRun
from .addresses import RELEASED_PREFIX
from .base_model import read_base, restore_with_base

LogFn = Callable[[str], None]

AVERAGED, OWED, REPLICAS, DELAYED, PARTS = "averaged.", "owed.", "replicas.", "delayed.", "parts."


def restore_state(prepared: PreparedRun, checkpoint: Checkpoint, say: LogFn) -> TrainState:
    """Restore the checkpoint's state.

    An average of the parameters starts here, or is dropped, if the setting for it has changed. Residuals of
    compressed gradient sums are resharded for the current replicas, if any still compress. A gradient that is
    one step late is dropped if another number of replicas held it. The state of a user's part of the step begins here, or is
    dropped, with the part.

    Raises:
        CheckpointError, DamagedError: As for `restore`.
    """
    program, places = prepared.step.program, prepared.step.shardings
    abstract, stored = program.abstract, checkpoint.manifest.arrays
    had_replicas = any(name.startswith(REPLICAS) for name in stored)
    if abstract.replicas is not None and not had_replicas:
        return _split_into_replicas(prepared, checkpoint, say)
    if (abstract.replicas is not None) != had_replicas or _replicas_differ(abstract, stored):
        return _restart_replicas(prepared, checkpoint, say)
    late = {DELAYED + name: tuple(leaf.shape) for name, leaf in named_leaves(abstract.delayed).items()}
    had_late = {name: tuple(entry.shape) for name, entry in stored.items() if name.startswith(DELAYED)}
    averages, had_averages = abstract.averaged is not None, any(name.startswith(AVERAGED) for name in stored)
    residuals = {name: tuple(leaf.shape) for name, leaf in (abstract.owed or {}).items()}
    had_residuals = {
        name.removeprefix(OWED): tuple(entry.shape) for name, entry in stored.items() if name.startswith(OWED)
    }
    parts, had_parts = set(abstract.parts or {}), {name.split(".")[1] for name in stored if name.startswith(PARTS)}
    if averages == had_averages and residuals == had_residuals and late == had_late and parts == had_parts:
        return _restore(prepared, checkpoint, abstract, places)
    requested = (abstract, places)
    if averages != had_averages:
        requested = tuple(_replaced(tree, "averaged", None) for tree in requested)
    if residuals != had_residuals:
        requested = tuple(map(_replaced, requested, ("owed", "owed"), _stored_residual_specs(prepared, had_residuals)))
    if late != had_late:
        requested = tuple(_replaced(tree, "delayed", None) for tree in requested)
    if parts != had_parts:
        requested = tuple(_replaced(tree, "parts", _only(tree.parts, had_parts)) for tree in requested)
    lost = bool(had_late) and late != had_late
    left_out = (
        lost
        or bool(had_parts - parts)
        or (had_averages and not averages)
        or bool(had_residuals.keys() - (requested[0].owed or {}).keys())
    )
    state = _restore(prepared, checkpoint, *requested, part=left_out)
    if late != had_late:
        if lost:
            say("the last batch's gradient, which would come one step late, is dropped")
        state = _zero_delayed(prepared, state)
    if had_averages and not averages:
        say("the checkpoint's averaged parameters are dropped: step.ema_decay is now None")
    elif averages and not had_averages:
        say("an average of the parameters begins with those of the checkpoint")
        state = restart_averaging(prepared, state)
    if parts != had_parts:
        state = _with_own_parts(prepared, state, had_parts, say)
    return state if residuals == had_residuals else _reshard_residuals(prepared, state, had_residuals, say)


def _restore(
    prepared: PreparedRun, checkpoint: Checkpoint, abstract: Any, shardings: Any, *, part: bool = False
) -> Any:
    """Restore a tree of which a part may be the run's base model."""

    init = prepared.experiment.init

    def read(init: str) -> Mapping[str, jax.Array]:
        return read_base(prepared.task, init, prepared.weight_places)

    return restore_with_base(
        checkpoint, abstract, shardings, read, init=init if init.startswith(RELEASED_PREFIX) else "", part=part
    )


def _only(states: Mapping[str, Any] | None, names: set[str]) -> dict[str, Any] | None:
    """Return those states of parts that have these names; None for none."""
    return {name: state for name, state in (states or {}).items() if name in names} or None


def _with_own_parts(prepared: PreparedRun, state: TrainState, had: set[str], say: LogFn) -> TrainState:
    """Begin the states of the user's parts that the checkpoint lacks."""
    program, shardings = prepared.step.program, prepared.step.shardings.parts or {}
    wanted = set(program.abstract.parts or {})
    for name in sorted(had - wanted):
        say(f"the checkpoint's state of the step part {name} is dropped: the run no longer has it")
    if begins := sorted(wanted - had):
        say(f"the state of {', '.join(begins)}, which the checkpoint lacks, begins here")
    lacking = [part for part in program.own_parts if part.name in wanted - had]
    places = {part.name: shardings[part.name] for part in lacking}

    def begun(params: Any) -> dict[str, Any]:
        return {part.name: part.init_state(params) for part in lacking}

    made = jax.jit(begun, out_shardings=places)(eqx.filter(state.params, program.dense))
    return dataclasses.replace(state, parts={**(state.parts or {}), **made} or None)


def restart_averaging(prepared: PreparedRun, state: TrainState) -> TrainState:
    """Start a new average of the parameters at their current values, if the run has one."""
    program, places = prepared.step.program, prepared.step.shardings.averaged
    if program.abstract.averaged is None:
        return state
    free = eqx.filter(state.params, program.trainable)
    return dataclasses.replace(state, averaged=jax.jit(init_averages, out_shardings=places)(free))


def _zero_delayed(prepared: PreparedRun, state: TrainState) -> TrainState:
    """Set the late gradient to zeros, if the run has one."""
    abstract, places = prepared.step.program.abstract.delayed, prepared.step.shardings.delayed
    if abstract is None:
        return state
    zeros = jax.jit(
        lambda: jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), abstract), out_shardings=places
    )
    return dataclasses.replace(state, delayed=zeros())


def _replicas_differ(abstract: TrainState, stored: Mapping[str, Any]) -> bool:
    """Return True if the replicas differ from those of the checkpoint."""
    leaves = named_leaves({"replicas": abstract.replicas})
    return any(tuple(stored[name].shape) != tuple(leaf.shape) for name, leaf in leaves.items() if name in stored)


def _split_into_replicas(prepared: PreparedRun, checkpoint: Checkpoint, say: LogFn) -> TrainState:
    """Restore a state of replicas that start local steps from shared parameters and optimizer state."""
    step = prepared.step
    program = step.program
    assert isinstance(step, CompiledStep)
    each = program.abstract.optimizer_state
    shared = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype), each)
    axes = [leaf_axes[1:] for _, _, leaf_axes in pair_axes(each, program.axes.optimizer_state)]
    lies = step.placement.storage_shardings(shared, jax.tree.structure(each).unflatten(axes))
    parts = ("step", "params", "model_state", "key", "guard")
    abstract = {part: getattr(program.abstract, part) for part in parts} | {"optimizer_state": shared}
    places = {part: getattr(step.shardings, part) for part in parts} | {"optimizer_state": lies}
    restored_parts = _restore(prepared, checkpoint, abstract, places, part=True)
    say("replicas begin to take local steps, each with the parameters and the optimizer's state of the checkpoint")

    def begun(restored_parts: dict[str, Any]) -> TrainState:
        state = program.initial_state(restored_parts["key"], (restored_parts["params"], restored_parts["model_state"]))
        count = jax.tree.leaves(each)[0].shape[0]
        return dataclasses.replace(
            state,
            step=restored_parts["step"],
            key=restored_parts["key"],
            guard=restored_parts["guard"],
            optimizer_state=add_replica_axis(restored_parts["optimizer_state"], count),
            replicas=dataclasses.replace(state.replicas, guard=add_replica_axis(restored_parts["guard"], count)),
        )

    return jax.jit(begun, out_shardings=step.shardings)(restored_parts)


def _restart_replicas(prepared: PreparedRun, checkpoint: Checkpoint, say: LogFn) -> TrainState:
    """Restore the parameters that a checkpoint's replicas last agreed on, with a fresh optimizer state."""
    step = prepared.step
    parts = ("step", "params", "model_state", "key")
    abstract = {part: getattr(step.program.abstract, part) for part in parts}
    places = {part: getattr(step.shardings, part) for part in parts}
    restored_parts = _restore(prepared, checkpoint, abstract, places, part=True)
    if step.program.abstract.replicas is None:
        say(
            "the progress of replicas since they last agreed is dropped, with the optimizer's state: the run now has "
            "no local steps"
        )
    else:
        say("replicas begin from what they agreed on last, and the optimizer's state begins with them")

    def begun(restored_parts: dict[str, Any]) -> TrainState:
        state = step.program.initial_state(
            restored_parts["key"], (restored_parts["params"], restored_parts["model_state"])
        )
        return dataclasses.replace(state, step=restored_parts["step"], key=restored_parts["key"])

    return jax.jit(begun, out_shardings=step.shardings)(restored_parts)


def _stored_residual_specs(prepared: PreparedRun, had: dict[str, tuple[int, ...]]) -> tuple[Any, Any]:
    """Return (shapes, shardings) of a checkpoint's residuals for the parameters that this run compresses; None
    without any."""
    step = prepared.step
    axes = step.program.axes.owed
    stored_shapes = {name: shape for name, shape in had.items() if name in (axes or {})}
    if not stored_shapes or not isinstance(step, CompiledStep):
        return None, None
    param_axes = {name: axes[name][len(step.program.comms.over) :] for name in stored_shapes} if axes else {}
    shapes = {name: jax.ShapeDtypeStruct(shape, jnp.float32) for name, shape in stored_shapes.items()}
    # As many arrays as there were replicas, unsharded along these dimensions, since they may not divide now.
    residual_axes = {
        name: (*(None,) * (len(shape) - len(param_axes[name])), *param_axes[name])
        for name, shape in stored_shapes.items()
    }
    return shapes, step.placement.storage_shardings(shapes, residual_axes)


def _reshard_residuals(
    prepared: PreparedRun, state: TrainState, had: dict[str, tuple[int, ...]], say: LogFn
) -> TrainState:
    step, over = prepared.step, prepared.step.program.comms.over
    abstract = step.program.abstract.owed
    if abstract is None:
        say("the residuals of compressed gradient sums are dropped: the run now compresses none")
        return dataclasses.replace(state, owed=None)
    say("the residuals of compressed gradient sums pass on to the current replicas")

    def passing(residuals: Any) -> dict[str, jax.Array]:
        return {
            name: reshard_residual(residuals[name], len(leaf.shape) - len(over), leaf.shape[: len(over)])
            if name in residuals
            else jnp.zeros(leaf.shape, leaf.dtype)
            for name, leaf in abstract.items()
        }

    return dataclasses.replace(state, owed=jax.jit(passing, out_shardings=step.shardings.owed)(state.owed or {}))


def _replaced(tree: TrainState, field: str, value: Any) -> TrainState:
    # Not constructed: the leaves are not arrays.
    return eqx.tree_at(
        lambda state: getattr(state, field),
        tree,
        value,
        is_leaf=lambda node: node is None or node is getattr(tree, field),
    )
