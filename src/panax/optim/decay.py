"""Which parameters decay, told by their logical axes: matrices do, norms and biases never, stacked or not."""

from collections.abc import Callable, Mapping
from typing import Any

import jax

from ..core.axes import path_name
from ..core.logical import is_copies
from ..core.protocols import Axes

SAME_SPACE = {"heads": "head", "kv_heads": "head", "head_dim": "head", "ssm_heads": "head", "ssm_head_dim": "head"}
SAME_SPACE |= {"key_value": "head", "value_dim": "head"}
SAME_SPACE |= {"ssm_groups": "group", "ssm_state": "group"}
"""Axes that together index one space: a bias over heads and head_dim is still a bias."""


def uses_weight_decay(axes: Axes) -> bool:
    """Whether a parameter maps one space to another: a weight or an embedding, and no norm or bias.

    >>> [uses_weight_decay(axes) for axes in (("layer", "embed", "heads", "head_dim"), ("layer", "heads", "head_dim"), ("norm",))]
    [True, False, False]
    """
    return len({SAME_SPACE.get(name or "", name) for name in axes if name and not is_copies(name)}) >= 2


def decay_mask(axes: Mapping[str, Axes]) -> Callable[[Any], Any]:
    """An optax mask: a tree of bools for any tree whose leaves bear the names in `axes` (or an index below them)."""

    def mask(tree: Any) -> Any:
        return jax.tree_util.tree_map_with_path(
            lambda path, _: uses_weight_decay(axes_named(path_name(path), axes)), tree
        )

    return mask


def axes_named(name: str, axes: Mapping[str, Axes]) -> Axes:
    """The axes of the parameter with this name, or of the layer of it that this name and an index stand for."""
    return axes[name] if name in axes else axes[name.rpartition(".")[0]]
