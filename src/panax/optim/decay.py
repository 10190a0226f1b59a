"""Selection of parameters for weight decay by logical axes: matrices decay, norms and biases never do,
stacked or not."""

from collections.abc import Callable, Mapping
from typing import Any

import jax

from ..core.params.axes import path_name
from ..core.params.logical import is_stack_axis
from ..core.protocols import Axes

SAME_SPACE: dict[str, str | None] = dict.fromkeys(
    ("heads", "kv_heads", "head_dim", "ssm_heads", "ssm_head_dim"), "head"
)
SAME_SPACE |= dict.fromkeys(("key_value", "value_dim", "delta_heads", "delta_value_dim"), "head")
SAME_SPACE |= dict.fromkeys(("ssm_groups", "ssm_state"), "group")
SAME_SPACE |= dict.fromkeys(("delta_key_heads", "delta_key_dim"), "key")
SAME_SPACE["magnitude"] = None
"""Axes that together index one space, so that a bias over heads and head_dim is still a bias; None of one of size 1,
which belongs to the space before it."""


def uses_weight_decay(axes: Axes) -> bool:
    """Return True if a parameter maps one space to another: a weight or an embedding, not a norm or a bias.

    >>> [uses_weight_decay(axes) for axes in (("layer", "embed", "heads", "head_dim"), ("layer", "heads", "head_dim"), ("norm",))]
    [True, False, False]
    """
    spaces = {SAME_SPACE.get(name or "", name) for name in axes if name and not is_stack_axis(name)}
    return len(spaces - {None}) >= 2


def decay_mask(axes: Mapping[str, Axes]) -> Callable[[Any], Any]:
    """Build an optax mask: a tree of bools for any tree with leaves named in `axes`, or by such a name and a
    layer index."""

    def mask(tree: Any) -> Any:
        return jax.tree_util.tree_map_with_path(
            lambda path, _: uses_weight_decay(lookup_axes(path_name(path), axes)), tree
        )

    return mask


def lookup_axes(name: str, axes: Mapping[str, Axes]) -> Axes:
    """Return the axes of the named parameter, or of the parameter that `name` is one layer of."""
    return axes[name] if name in axes else axes[name.rpartition(".")[0]]
