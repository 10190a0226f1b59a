"""Local steps: each replica trains its own parameters, and replicas synchronize every few steps (DiLoCo).

    outer gradient = mean over replicas of (the synchronized parameters - the replica's parameters)

An outer optimizer, SGD with Nesterov momentum, applies the outer gradient, and all replicas continue from the
result. Nothing is sent between replicas in the meantime. The outer gradient is compressed according to
`comms.compress`.

Source: arXiv:2311.08105; int4 outer gradients: arXiv:2501.18512.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from ..core.errors import RecipeError
from ..core.layout.declarations import tag_comm
from ..core.layout.layout import Layout
from ..core.measures import DataChecks
from ..core.params.axes import named_leaves, pair_axes
from ..core.task import Task
from ..mesh.placement import partition_entries
from ..spmd.collectives import all_reduce
from ..spmd.manual import map_over_shards
from ..spmd.sharding_marks import ValueState, assert_sharding
from .fragments import FragmentSlice, OuterSync, assign_fragments
from .reduction import Residuals, compressed_views, reduce_compressed
from .residuals import per_device_axis
from .settings import Comms

REPLICA = "replica"


class Replicas(eqx.Module):
    """Per-replica state, with a leading replica dimension, and the state of the outer optimizer.

    Attributes:
        params: Parameters of each replica, trainable and frozen.
        guard: Step guard of each replica.
        momentum: Momentum of the outer optimizer for trainable parameters; float32, and equal on all
            replicas.
    """

    params: Any
    guard: Any
    momentum: Any


class OuterState(NamedTuple):
    """State that an outer step reads and updates.

    Attributes:
        params: Parameters of the last synchronization.
        replicas: Per-replica state.
        owed: Residuals of compressed reductions; None without error feedback.
    """

    params: Any
    replicas: Replicas
    owed: Residuals


def check_local_steps(comms: Comms, layout: Layout, task: Task, model_state: Any) -> None:
    """Check that the mesh and the task support replicas that train separately.

    Raises:
        RecipeError: The mesh or the task does not; the message names the setting to change.
    """
    setting = f"comms.local_steps={comms.local_steps}"
    if layout.sizes[REPLICA] == 1:
        raise RecipeError(f"{setting} has no effect: the mesh has replica=1; set mesh.replica, or remove comms")
    if not task.names_axes:
        raise RecipeError(
            f"{setting}: {type(task).__name__} names no axes, so XLA partitions its program over all replicas; remove "
            f"comms"
        )
    if jax.tree.leaves(model_state):
        raise RecipeError(
            f"{setting}: {type(task).__name__} has state in addition to its parameters, on which replicas would not "
            f"agree; set comms.local_steps=1"
        )


def add_replica_axis(tree: Any, count: int) -> Any:
    """Broadcast every array along a new leading replica axis."""
    return jax.tree.map(lambda x: jnp.broadcast_to(x, (count, *x.shape)), tree)


def replica_axes(tree: Any, axes: Any) -> Any:
    """Return the logical axes of a tree after `add_replica_axis`."""
    found = [(per_device_axis(REPLICA), *leaf_axes) for _, _, leaf_axes in pair_axes(tree, axes)]
    return jax.tree.structure(tree).unflatten(found)


def sync_replicas(
    state: OuterState, step: jax.Array, sync: OuterSync, *, comms: Comms, axes: Any, trainable: Any, layout: Layout
) -> OuterState:
    """Take an outer step of some fragments, and update the replicas that adopt results.

    Args:
        step: Step number, the seed of stochastic rounding.
        sync: Which fragments to send and to adopt.
        axes: Logical axes at each leaf, with the structure of the parameters.
        trainable: Tree of bools with the structure of the parameters.
    """
    params, replicas, owed = state
    count = layout.sizes[REPLICA]
    named = {
        name: (leaf.shape, tuple(leaf_axes))
        for (name, leaf, leaf_axes), keep in zip(pair_axes(params, axes), jax.tree.leaves(trainable))
        if keep
    }
    # `sent` and `received` list (parameter name, layers); `mixing` is the weight of a replica's own parameters.
    fragments = assign_fragments(named, layout, comms.fragments)
    sent = [(name, layers) for fragment in sync.sent_fragments for name, layers in fragments[fragment].items()]
    received = [(name, layers) for fragment in sync.received_fragments for name, layers in fragments[fragment].items()]
    mixing = 0.0 if sync.is_full or not comms.overlap_steps else comms.mixing

    def summed(
        terms: dict[str, jax.Array], owed: dict[str, jax.Array] | None, step: jax.Array
    ) -> tuple[dict[str, jax.Array], dict[str, jax.Array] | None]:
        sums: dict[str, jax.Array] = {}
        with tag_comm("outer gradients"):
            if comms.compress:
                ways = compressed_views({name: (x.shape, named[name][1]) for name, x in terms.items()}, comms, layout)
                residuals = None if owed is None else {name: owed[name] for name in ways}
                sums, new_residuals = reduce_compressed(
                    {name: terms[name] for name in ways}, ways, residuals, comms, layout, step
                )
                owed = None if new_residuals is None else dict(new_residuals)
            return sums | {name: all_reduce(x, (REPLICA,)) for name, x in terms.items() if name not in sums}, owed

    def local(
        params: Mapping[str, jax.Array],
        replica_params: Mapping[str, jax.Array],
        momentum: Mapping[str, jax.Array],
        owed: Residuals,
        step: jax.Array,
    ) -> tuple[dict[str, jax.Array], dict[str, jax.Array], dict[str, jax.Array], Residuals]:
        after, new_replica_params, moved = dict(params), dict(replica_params), dict(momentum)
        new_residuals = None if owed is None else dict(owed)
        # One fragment at a time, since an array's layers may belong to several fragments.
        for fragment in sync.sent_fragments:
            pieces = fragments[fragment]
            terms = {
                name: assert_sharding(
                    (
                        _part(after[name], layers).astype(jnp.float32)
                        - _part(replica_params[name][0], layers).astype(jnp.float32)
                    )
                    / count,
                    {REPLICA: ValueState.PARTIAL},
                )
                for name, layers in pieces.items()
            }
            before = None
            if new_residuals is not None:
                before = {
                    name: _part(new_residuals[name][0], layers)[None]
                    for name, layers in pieces.items()
                    if name in new_residuals
                }
            sums, sent_residuals = summed(terms, before, step)
            # SGD with Nesterov momentum, in float32.
            for name, gradient in sums.items():
                layers, w = pieces[name], _part(after[name], pieces[name])
                speed = comms.outer_momentum * _part(moved[name], layers) + gradient
                change = comms.outer_rate * (gradient + comms.outer_momentum * speed)
                moved[name] = _with_part(moved[name], layers, speed)
                after[name] = _with_part(after[name], layers, (w.astype(jnp.float32) - change).astype(w.dtype))
            if new_residuals is not None and sent_residuals is not None:
                for name, one in sent_residuals.items():
                    new_residuals[name] = _with_part(new_residuals[name][0], pieces[name], one[0])[None]
        # Adopt the result, mixed with the replica's own parameters.
        for name, layers in received:
            w, mine = _part(after[name], layers), _part(replica_params[name][0], layers)
            if mixing:
                wide = mixing * mine.astype(jnp.float32) + (1 - mixing) * w.astype(jnp.float32)
                w = wide.astype(w.dtype)
            new_replica_params[name] = _with_part(new_replica_params[name][0], layers, w)[None]
        return after, new_replica_params, moved, new_residuals

    # Run on local shards, only for parameters in a fragment that is sent or adopted now.
    specs = {
        name: PartitionSpec(*partition_entries(layout.storage(leaf_axes))) for name, (_, leaf_axes) in named.items()
    }
    used = {name for name, _ in (*sent, *received)}
    specs = {name: spec for name, spec in specs.items() if name in used}
    replica_specs = {name: PartitionSpec(REPLICA, *spec) for name, spec in specs.items()}
    used_residuals = None if owed is None else {name: x for name, x in owed.items() if name in used}
    residual_specs = None if used_residuals is None else {name: replica_specs[name] for name in used_residuals}
    flat, replica_params = _named(params, trainable), _named(replicas.params, trainable)
    arguments = [{name: tree[name] for name in specs} for tree in (flat, replica_params, replicas.momentum)]
    after, mine, moved, used_residuals = map_over_shards(
        local,
        layout,
        (specs, replica_specs, specs, residual_specs, PartitionSpec()),
        (specs, replica_specs, specs, residual_specs),
    )(*arguments, used_residuals, step)
    return OuterState(
        _put_back(params, trainable, flat | after),
        Replicas(
            _put_back(replicas.params, trainable, replica_params | mine),
            replicas.guard,
            {**replicas.momentum, **moved},
        ),
        None if owed is None else {**owed, **(used_residuals or {})},
    )


def _part(x: jax.Array, layers: FragmentSlice) -> jax.Array:
    return x if layers is None else x[layers]


def _with_part(x: jax.Array, layers: FragmentSlice, value: jax.Array) -> jax.Array:
    return value if layers is None else x.at[layers].set(value)


def _named(tree: Any, trainable: Any) -> dict[str, jax.Array]:
    leaves = named_leaves(tree)
    return {name: leaf for (name, leaf), keep in zip(leaves.items(), jax.tree.leaves(trainable)) if keep}


def _put_back(tree: Any, trainable: Any, named: Mapping[str, jax.Array]) -> Any:
    names = list(named_leaves(tree))
    leaves = [
        named[name] if keep else leaf
        for name, leaf, keep in zip(names, jax.tree.leaves(tree), jax.tree.leaves(trainable))
    ]
    return jax.tree.structure(tree).unflatten(leaves)


def merge_replica_metrics(scalars: Any) -> Any:
    """Merge replicas' reports: the maximum of counts, any of booleans, the mean of other values."""

    def one(x: Any) -> Any:
        if isinstance(x, DataChecks):
            return dataclasses.replace(x, worst=x.worst.max(0))
        if jnp.issubdtype(x.dtype, jnp.bool_):
            return x.any(0)
        return x.max(0) if jnp.issubdtype(x.dtype, jnp.integer) else x.mean(0)

    return jax.tree.map(one, scalars, is_leaf=lambda x: isinstance(x, DataChecks))
