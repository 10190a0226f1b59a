"""Local steps: each replica trains its own parameters, and every so many steps all agree (DiLoCo).

    outer gradient = mean over replicas of (the parameters agreed on - the replica's own)

An outer optimizer takes it as a gradient, SGD with Nesterov momentum, and all replicas go on from what it gives. Nothing crosses
the replicas in between. The outer gradient travels as `comms.compress` says.

Source: arXiv:2311.08105; int4 outer gradients: arXiv:2501.18512.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from ..core.axes import named_leaves, pair_axes
from ..core.errors import RecipeError
from ..core.expected import moving
from ..core.layout import Layout
from ..core.task import Task
from ..mesh.placement import as_spec
from ..spmd.collectives import all_reduce
from ..spmd.manual import on_each_device
from ..spmd.marks import Holds, declared
from .owed import each
from .reduction import Owed, compressed_sums, ways_of
from .settings import Comms

REPLICA = "replica"


class Replicas(eqx.Module):
    """What each replica keeps for itself, with replicas in front, and what all keep of the outer optimizer.

    Attributes:
        params: Each replica's own, trainable and frozen.
        guard: Each replica's own.
        momentum: Of the outer optimizer, for trainable parameters, in float32 and alike on all replicas.
    """

    params: Any
    guard: Any
    momentum: Any


class Agreed(NamedTuple):
    """What an outer step gives.

    Attributes:
        params: Agreed on.
        owed: What compressed sums owe now.
    """

    params: Any
    replicas: Replicas
    owed: Owed


def check_local_steps(comms: Comms, layout: Layout, task: Task, model_state: Any) -> None:
    """Refuse meshes and tasks that can't train replicas apart.

    Raises:
        RecipeError: Says what to set.
    """
    asked = f"comms.local_steps={comms.local_steps}"
    if layout.sizes[REPLICA] == 1:
        raise RecipeError(f"{asked} has no effect: the mesh has replica=1; set mesh.replica, or leave comms out")
    if not task.names_axes:
        raise RecipeError(
            f"{asked}: {type(task).__name__} names no axes, so XLA partitions its program over all replicas; leave comms out"
        )
    if jax.tree.leaves(model_state):
        raise RecipeError(
            f"{asked}: {type(task).__name__} carries state beside its parameters, on which replicas would not agree; set "
            f"comms.local_steps=1"
        )


def in_front(tree: Any, count: int) -> Any:
    """Every array as each replica's own, alike."""
    return jax.tree.map(lambda x: jnp.broadcast_to(x, (count, *x.shape)), tree)


def axes_in_front(tree: Any, axes: Any) -> Any:
    """The logical axes of what `in_front` gives of a tree with these."""
    found = [(each(REPLICA), *leaf_axes) for _, _, leaf_axes in pair_axes(tree, axes)]
    return jax.tree.structure(tree).unflatten(found)


def agree(
    comms: Comms,
    params: Any,
    axes: Any,
    trainable: Any,
    replicas: Replicas,
    owed: Owed,
    step: jax.Array,
    layout: Layout,
) -> Agreed:
    """An outer step.

    Args:
        params: Those agreed on last.
        axes: Like `params`, the logical axes at each leaf.
        trainable: Like `params`.
    """
    count = layout.sizes[REPLICA]
    named = {
        name: tuple(leaf_axes)
        for (name, _, leaf_axes), keep in zip(pair_axes(params, axes), jax.tree.leaves(trainable))
        if keep
    }

    def local(
        params: Mapping[str, jax.Array],
        own: Mapping[str, jax.Array],
        momentum: Mapping[str, jax.Array],
        owed: Owed,
        step: jax.Array,
    ) -> tuple[dict[str, jax.Array], dict[str, jax.Array], dict[str, jax.Array], Owed]:
        terms = {
            name: declared((w.astype(jnp.float32) - own[name][0].astype(jnp.float32)) / count, {REPLICA: Holds.PARTIAL})
            for name, w in params.items()
        }
        sums: dict[str, jax.Array] = {}
        with moving("outer gradients"):
            if comms.compress:
                ways = ways_of({name: (x.shape, named[name]) for name, x in terms.items()}, comms, layout)
                sums, owed = compressed_sums({name: terms[name] for name in ways}, ways, owed, comms, layout, step)
            sums |= {name: all_reduce(x, (REPLICA,)) for name, x in terms.items() if name not in sums}
        after, moved = {}, {}
        for name, gradient in sums.items():
            moved[name] = comms.outer_momentum * momentum[name] + gradient
            change = comms.outer_rate * (gradient + comms.outer_momentum * moved[name])
            after[name] = (params[name].astype(jnp.float32) - change).astype(params[name].dtype)
        return after, {name: w[None] for name, w in after.items()}, moved, owed

    rests = {name: PartitionSpec(*as_spec(layout.storage(named[name]))) for name in named}
    apart = {name: PartitionSpec(REPLICA, *spec) for name, spec in rests.items()}
    lies = None if owed is None else {name: apart[name] for name in owed}
    flat, own = _named(params, trainable), _named(replicas.params, trainable)
    after, own, moved, owed = on_each_device(
        local, layout, (rests, apart, rests, lies, PartitionSpec()), (rests, apart, rests, lies)
    )(flat, own, replicas.momentum, owed, step)
    return Agreed(
        _put_back(params, trainable, after),
        Replicas(_put_back(replicas.params, trainable, own), replicas.guard, moved),
        owed,
    )


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


def merged(scalars: Any) -> Any:
    """What replicas report, as one figure each: counts by the largest, what is true of one as true, the rest by their mean."""

    def one(x: jax.Array) -> jax.Array:
        if jnp.issubdtype(x.dtype, jnp.bool_):
            return x.any(0)
        return x.max(0) if jnp.issubdtype(x.dtype, jnp.integer) else x.mean(0)

    return jax.tree.map(one, scalars)
