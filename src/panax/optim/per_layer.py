"""Unstacking for optax, so that a transformation sees each layer's array although layers are stored stacked.

LAMB's norms, Adafactor's factors and Muon's orthogonalization are defined on a single layer's matrix. Applied
to a stack, they silently give different updates (LAMB was off by 57 %, Muon by 270 %). `apply_per_layer` makes
a stacked tree train exactly as the unstacked one would. Panax's own optimizers do not need it
(`sharded/sharded_optimizer.py`).
"""

from collections.abc import Mapping
from typing import Any, Literal

import jax
import jax.numpy as jnp
import optax

from ..core.params.axes import path_name
from ..core.protocols import Axes

Scope = Literal["element", "tree"]
"""Dependency of one element of an update: on that element's history only, or on anything in the tree."""

STACK_AXES = ("stage", "layer")


def stack_depth(axes: Axes) -> int:
    """Return the number of leading axes that stack layers.

    >>> stack_depth(("layer", "embed", "ffn")), stack_depth(("vocab", "embed"))
    (1, 0)
    """
    depth = 0
    while depth < len(axes) and axes[depth] in STACK_AXES:
        depth += 1
    return depth


def apply_per_layer(
    inner: optax.GradientTransformation, axes: Mapping[str, Axes], scope: Scope
) -> optax.GradientTransformation:
    """Apply `inner` as if stacked layers were separate parameters.

    Args:
        axes: Parameter name to logical axes.
        scope: "element" needs no unstacking; "tree", the safe choice for an unknown transformation, unstacks
            all layers.
    """
    return inner if scope == "element" else _unstacked(inner, axes)


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

    def update(updates: Any, state: Any, params: Any = None, **more: Any) -> tuple[Any, Any]:
        new, state = inner.update(split(updates), state, None if params is None else split(params), **more)
        return join(new, updates), state

    if isinstance(inner, optax.GradientTransformationExtraArgs):
        return optax.GradientTransformationExtraArgs(init, update)
    return optax.GradientTransformation(init, update)
