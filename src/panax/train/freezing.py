"""Which parameters are frozen: whole ones by their names, single layers of stacked ones by `layers.N`."""

import re
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ..core import named_leaves
from ..core.errors import RecipeError

_LAYERS = re.compile(r"layers\.(\d+)(?:-(\d+))?(?:\.(.+))?")

LayerParameters = Mapping[int, Mapping[str, tuple[str, int]]]
"""For each layer its parameters by their names in it: the name of the stacked array, and the layer's index there."""

Rows = Mapping[str, frozenset[int]]
"""For a stacked parameter, the layers of it that are frozen."""


def freeze(
    params: Any, frozen: tuple[str, ...], fixed: tuple[str, ...], layers: LayerParameters
) -> tuple[Any, Rows | None]:
    """Which parameters train, as a tree of bools, and which layers of these don't; None where all do.

    Args:
        frozen: Prefixes of parameter names; or `layers.3`, `layers.0-5`, `layers.3.attention` for single layers.
        fixed: Names of parameters that the model itself holds fixed.
        layers: Where each layer's parameters are stacked; empty for a model that stacks none.

    Raises:
        RecipeError: A prefix matches nothing, or nothing is left to train.
    """
    leaves = named_leaves(params)
    whole = {name for name in leaves if name in fixed}
    rows: dict[str, set[int]] = {}
    for prefix in frozen:
        matching = [name for name in leaves if _within(name, prefix)]
        whole.update(matching)
        if not matching:
            for name, row in _of_layers(prefix, layers, leaves):
                rows.setdefault(name, set()).add(row)
    for name, found in rows.items():
        if len(found) == leaves[name].shape[0]:
            whole.add(name)
    if len(whole) == len(leaves):
        raise RecipeError("every parameter is frozen, so there is nothing to train; unfreeze some")
    resting = {name: frozenset(found) for name, found in rows.items() if name not in whole}
    free = [name not in whole for name in leaves]
    return jax.tree.unflatten(jax.tree.structure(params), free), resting or None


def at_rest(tree: Any, rows: Rows | None) -> Any:
    """Gradients or updates with zeros for the layers that are frozen."""
    if rows is None:
        return tree
    frozen = rows

    def masked(name: str, leaf: jax.Array) -> jax.Array:
        if name not in frozen:
            return leaf
        keep = np.array([row not in frozen[name] for row in range(leaf.shape[0])])
        return jnp.where(keep.reshape(-1, *[1] * (leaf.ndim - 1)), leaf, jnp.zeros_like(leaf))

    names = jax.tree.unflatten(jax.tree.structure(tree), list(named_leaves(tree)))
    return jax.tree.map(masked, names, tree)


def _within(name: str, prefix: str) -> bool:
    return name == prefix or name.startswith(prefix.rstrip(".") + ".")


def _of_layers(prefix: str, layers: LayerParameters, leaves: Mapping[str, Any]) -> list[tuple[str, int]]:
    """The stacked arrays, and the index in each, that a prefix `layers.N` means."""
    match = _LAYERS.fullmatch(prefix.rstrip("."))
    names = list(leaves)
    if match is None or not layers:
        single = "; single layers are layers.0, layers.1-3, layers.0.attention" if layers else ""
        raise RecipeError(f"frozen: {prefix!r} matches no parameter; the first ones are {', '.join(names[:5])}{single}")
    first, last, inner = int(match[1]), int(match[2] or match[1]), match[3]
    absent = [layer for layer in range(first, last + 1) if layer not in layers]
    if absent or last < first:
        raise RecipeError(f"frozen: {prefix!r}: the model has the layers {min(layers)} to {max(layers)}")
    chosen = [
        place
        for layer in range(first, last + 1)
        for name, place in layers[layer].items()
        if inner is None or _within(name, inner)
    ]
    if not chosen:
        raise RecipeError(
            f"frozen: {prefix!r} matches no parameter; layer {first} has {', '.join(dict.fromkeys(layers[first]))}"
        )
    return chosen
