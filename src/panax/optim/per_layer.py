"""Optimizers see each layer's own array, though layers are stacked in storage.

LAMB's norms, Adafactor's factors and Muon's orthogonalisation are defined on one layer's matrix. On a stack of them they give
something else without a word (LAMB was off by 57 %, Muon by 270 %). `on_each_layer` makes a stacked tree train exactly as the
separate one would.
"""

from collections.abc import Mapping
from typing import Any, Literal

import equinox as eqx
import jax
import jax.numpy as jnp
import optax

from ..core.axes import path_name
from ..core.protocols import Axes

Scope = Literal["element", "array", "tree"]
"""What one number of an update depends on: its own history; its array's; or that of the whole tree."""

STACK_AXES = ("stage", "layer")


def stack_depth(axes: Axes) -> int:
    """How many leading axes stack layers.

    >>> stack_depth(("layer", "embed", "ffn")), stack_depth(("vocab", "embed"))
    (1, 0)
    """
    depth = 0
    while depth < len(axes) and axes[depth] in STACK_AXES:
        depth += 1
    return depth


def on_each_layer(
    inner: optax.GradientTransformation, axes: Mapping[str, Axes], scope: Scope
) -> optax.GradientTransformation:
    """Apply `inner` as if stacked layers were separate parameters.

    Args:
        axes: Parameter name to logical axes.
        scope: "element" needs nothing; "array" is run by `vmap` over each group of equally stacked parameters, so its
            program does not grow with depth; "tree" (any transformation that nothing is known of) sees all layers unstacked.
    """
    if scope == "element":
        return inner
    if scope == "array":
        return _by_vmap(inner, axes)
    return _unstacked(inner, axes)


def _unstacked(inner: optax.GradientTransformation, axes: Mapping[str, Axes]) -> optax.GradientTransformation:
    def split(tree: Any) -> Any:
        def one(path: tuple, leaf: jax.Array) -> Any:
            depth = stack_depth(axes[path_name(path)])
            if not depth:
                return leaf
            flat = leaf.reshape(-1, *leaf.shape[depth:])
            return [flat[i] for i in range(flat.shape[0])]

        return jax.tree_util.tree_map_with_path(one, tree)

    def join(tree: Any, like: Any) -> Any:
        leaves, treedef = jax.tree.flatten(like)
        parts = treedef.flatten_up_to(tree)
        return treedef.unflatten(
            [
                jnp.stack(part).reshape(leaf.shape) if isinstance(part, list) else part
                for part, leaf in zip(parts, leaves)
            ]
        )

    def init(params: Any) -> Any:
        return inner.init(split(params))

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        new, state = inner.update(split(updates), state, None if params is None else split(params))
        return join(new, updates), state

    return optax.GradientTransformation(init, update)


def _by_vmap(inner: optax.GradientTransformation, axes: Mapping[str, Axes]) -> optax.GradientTransformation:
    def groups(tree: Any) -> dict[str, tuple[int, Any]]:
        """Name to (stacking depth, the tree with None at every leaf of another group)."""

        def group_of(path: tuple, leaf: Any) -> str:
            depth = stack_depth(axes[path_name(path)])
            return "x".join(map(str, leaf.shape[:depth])) or "single"

        names = jax.tree_util.tree_map_with_path(group_of, tree)
        return {
            name: (
                0 if name == "single" else name.count("x") + 1,
                eqx.filter(tree, jax.tree.map(name.__eq__, names)),
            )
            for name in sorted(set(jax.tree.leaves(names)))
        }

    def over_stack(function: Any, depth: int) -> Any:
        for _ in range(depth):
            function = jax.vmap(function)
        return function

    def init(params: Any) -> Any:
        return {name: over_stack(inner.init, depth)(part) for name, (depth, part) in groups(params).items()}

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        parameter_groups = {} if params is None else groups(params)
        results, states = [], {}
        for name, (depth, part) in groups(updates).items():
            arguments = (part, state[name], parameter_groups[name][1]) if params is not None else (part, state[name])
            new, states[name] = over_stack(inner.update, depth)(*arguments)
            results.append(new)
        return eqx.combine(*results), states

    return optax.GradientTransformation(init, update)
