"""Logical axes of optimizer state, derived from those of the parameters."""

from collections.abc import Mapping
from typing import Any

import jax

from ..core.params.axes import path_name
from ..core.protocols import Axes


def optimizer_state_axes(state: Any, params: Mapping[str, tuple[tuple[int, ...], Axes]]) -> Any:
    """Return the logical axes of each leaf of an (abstract) optimizer state.

    A leaf with a path that ends in a parameter's name is sharded like the parameter: a moment of the same
    shape, a factor that lacks one axis, or one layer of a stack. Any other leaf (a count, a scale) is
    replicated.

    Args:
        params: Parameter name to (shape, logical axes).
    """

    def one(path: tuple, leaf: Any) -> Axes:
        replicated: Axes = (None,) * leaf.ndim
        keys = [path_name((entry,)) for entry in path]
        for start in range(len(keys)):
            # The path ends in the parameter's name, optionally followed by a layer index.
            for end in (len(keys), len(keys) - 1):
                name = ".".join(keys[start:end])
                if name in params:
                    return _axes_like(leaf.shape, *params[name]) or replicated
        return replicated

    return jax.tree_util.tree_map_with_path(one, state)


def _axes_like(shape: tuple[int, ...], like: tuple[int, ...], axes: Axes) -> Axes | None:
    if shape == like:
        return axes
    if len(shape) != len(like) - 1:
        return None
    # One axis is missing; if two axes of equal size qualify with different names, the result is ambiguous.
    candidates = {axes[:i] + axes[i + 1 :] for i in range(len(like)) if like[:i] + like[i + 1 :] == shape}
    return candidates.pop() if len(candidates) == 1 else None
