"""Selection of frozen parameters: whole parameters by name, single layers of stacked ones by `layers.N`."""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ..core import named_leaves
from ..core.errors import RecipeError
from ..core.params.selection import LayerParameters, select_params

Rows = Mapping[str, frozenset[int]]
"""For a stacked parameter, its frozen layers."""


def freeze(
    params: Any, frozen: tuple[str, ...], fixed: tuple[str, ...], layers: LayerParameters
) -> tuple[Any, Rows | None]:
    """Return which parameters train, as a tree of bools, and which of their layers are frozen; None if no
    layer is.

    Args:
        frozen: Prefixes of parameter names, or patterns with `*`; or `layers.3`, `layers.0-5`,
            `layers.3.attention` for single layers.
        fixed: Names of parameters that the model itself holds fixed.
        layers: Index of the stacked layers' parameters; empty for a model without stacks.

    Raises:
        RecipeError: A prefix matches nothing, or nothing is left to train.
    """
    leaves = named_leaves(params)
    frozen_names = {name for name in leaves if name in fixed}
    rows: dict[str, set[int]] = {}
    for prefix in frozen:
        for name, chosen in select_params(prefix, leaves, layers, "frozen").items():
            if chosen is None:
                frozen_names.add(name)
            else:
                rows.setdefault(name, set()).update(chosen)
    for name, indices in rows.items():
        if len(indices) == leaves[name].shape[0]:
            frozen_names.add(name)
    if len(frozen_names) == len(leaves):
        raise RecipeError("every parameter is frozen, so there is nothing to train; unfreeze some")
    resting = {name: frozenset(indices) for name, indices in rows.items() if name not in frozen_names}
    free = [name not in frozen_names for name in leaves]
    return jax.tree.unflatten(jax.tree.structure(params), free), resting or None


def mask_frozen_layers(tree: Any, rows: Rows | None, instead: Any = None) -> Any:
    """Replace the values of frozen layers in a tree with the structure of the parameters.

    Args:
        instead: A tree of replacement values; None for zeros, as for gradients and updates.
    """
    if rows is None:
        return tree
    frozen = rows

    def masked(name: str, leaf: jax.Array, other: jax.Array) -> jax.Array:
        if name not in frozen:
            return leaf
        keep = np.array([row not in frozen[name] for row in range(leaf.shape[0])])
        return jnp.where(keep.reshape(-1, *[1] * (leaf.ndim - 1)), leaf, other.astype(leaf.dtype))

    names = jax.tree.unflatten(jax.tree.structure(tree), list(named_leaves(tree)))
    return jax.tree.map(masked, names, tree, jax.tree.map(jnp.zeros_like, tree) if instead is None else instead)
