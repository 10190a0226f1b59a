"""Logical axes read from annotations, the only place where a parameter's shape is written.

`w_up: Float[Array, "embed ffn"]` has the axes ("embed", "ffn"). Everything else is derived from them: the
initial shape, the sharding, the planned bytes and the weight-decay mask.
"""

import functools
import types
import typing
from typing import Any

import jax
import jaxtyping

from ..protocols import Axes


def annotation_axes(annotation: Any) -> Axes | None:
    """Return the dimension names of a jaxtyping annotation or of `X | None`; None if it is not an array
    annotation.

    >>> from jaxtyping import Array, Float
    >>> annotation_axes(Float[Array, "embed ffn"] | None)
    ('embed', 'ffn')
    >>> annotation_axes(int) is None
    True
    """
    if typing.get_origin(annotation) in (typing.Union, types.UnionType):
        found = [annotation_axes(member) for member in typing.get_args(annotation)]
        return next((axes for axes in found if axes is not None), None)
    if isinstance(annotation, type) and issubclass(annotation, jaxtyping.AbstractArray):
        return tuple(annotation.dim_str.split())
    return None


@functools.cache
def class_axes(cls: type) -> dict[str, Axes]:
    """Return field name to logical axes for the array fields of `cls`."""
    hints = typing.get_type_hints(cls)
    return {name: axes for name, hint in hints.items() if (axes := annotation_axes(hint)) is not None}


def path_name(path: tuple[Any, ...]) -> str:
    """Format a pytree path as a dotted name, under which a parameter is printed, matched and saved.

    >>> path_name(jax.tree_util.tree_flatten_with_path({"a": [1, 2]})[0][1][0])
    'a.1'
    """
    return jax.tree_util.keystr(path, simple=True, separator=".")


def named_leaves(tree: Any) -> dict[str, Any]:
    """Return dotted name to leaf, in tree order.

    >>> named_leaves({"a": [1, 2], "b": 3})
    {'a.0': 1, 'a.1': 2, 'b': 3}
    """
    return {path_name(path): leaf for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]}


def pair_axes(tree: Any, axes: Any) -> list[tuple[str, Any, Axes]]:
    """Return (name, leaf, logical axes) for each leaf of `tree`; `axes` has its structure, with a tuple at
    each leaf.
    """
    named, treedef = jax.tree_util.tree_flatten_with_path(tree)
    return [(path_name(path), leaf, tuple(a)) for (path, leaf), a in zip(named, treedef.flatten_up_to(axes))]


def map_axes(function: Any, tree: Any, axes: Any) -> Any:
    """Map `function(leaf, axes)` over the leaves of `tree`, and return the tree of results."""
    leaves, treedef = jax.tree_util.tree_flatten(tree)
    return treedef.unflatten([function(leaf, tuple(a)) for leaf, a in zip(leaves, treedef.flatten_up_to(axes))])
