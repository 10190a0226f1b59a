"""What the code of the language says of its values to the check of a traced step (`checking/`).

A mark is an identity: it lowers to nothing. It stands where an author knows more than can be followed from one operation to the
next: that a custom kernel's result is split like its operands, that a schedule's gradients are terms of a sum, that a step will
add a gradient up. Marks stand inside of custom derivatives or after a gradient; a tangent passes unmarked.
"""

import enum
import functools
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import jax

from ..core.jax_primitives import define_primitive, read_parameter
from ..core.layout import MeshAxes, current_layout

Tree = TypeVar("Tree")


class ValueState(enum.Enum):
    """What each device along a mesh axis holds of a value."""

    WHOLE = "whole"
    """The same value as the others."""
    SPLIT = "split"
    """Its part of an array; a sum over its elements is a term of the sum over the array's."""
    OWN = "own"
    """A value of its own; sums over its elements are nobody else's."""
    PARTIAL = "partial"
    """A term: the sum over devices is what is meant."""
    UNKNOWN = "unknown"
    """What its code makes of it, which is not followed."""


class ShardingMark(enum.Enum):
    DECLARED = "declared"
    EXPECTED = "expected"
    SHARED = "shared"
    LINEAR = "linear"


mark_p = define_primitive(
    "spmd_mark",
    compute=lambda x, *_, **params: x,
    infer=lambda x, *_, **params: x,
    batch=lambda xs, dims, *, dim, **params: (mark_p.bind(*xs, dim=dim + (dims[0] <= dim), **params), dims[0]),
    differentiate=lambda primals, tangents, **params: (mark_p.bind(*primals, **params), tangents[0]),
)


class Marked(NamedTuple):
    """The parameters of a mark in a traced program.

    Attributes:
        holds: Mesh axis to what may be there.
        label: Of an expected value, its name in an error.
        dim: The dimension that split arrays are split along.
    """

    mark: ShardingMark
    holds: Mapping[str, tuple[ValueState, ...]]
    label: str
    dim: int


def read_mark(equation: Any) -> Marked | None:
    """Read a mark; None for an equation of any other primitive."""
    if equation.primitive is not mark_p:
        return None
    mark, holds, label, dim = (read_parameter(equation, name) for name in ("mark", "holds", "label", "dim"))
    return Marked(mark, dict(holds), label, dim)


def assert_sharding(tree: Tree, holds: Mapping[str, ValueState], dim: int = 0) -> Tree:
    """`tree`, of whose arrays each holds what is said along the mesh axes that are named, whatever was followed so far.

    Args:
        dim: The dimension that split arrays are split along.

    >>> float(assert_sharding(jax.numpy.float32(1.0), {"tensor": ValueState.PARTIAL}))
    1.0
    """
    return _marked(tree, ShardingMark.DECLARED, tuple((axis, (what,)) for axis, what in holds.items()), "", dim)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1, 2))
def _returning(tree: Any, holds: tuple[tuple[str, ValueState], ...], dim: int) -> Any:
    return tree


_returning.defvjp(
    lambda tree, holds, dim: (tree, None),
    lambda holds, dim, _, gradient: (assert_sharding(gradient, dict(holds), dim),),
)


def split_over(tree: Tree, places: Sequence[MeshAxes]) -> Tree:
    """`tree`, of whose arrays each is split over the mesh axes named for its dimensions, whatever was followed so far."""
    for dim, axes in enumerate(places):
        tree = assert_sharding(tree, dict.fromkeys(axes, ValueState.SPLIT), dim)
    return tree


def assert_cotangent_sharding(tree: Tree, holds: Mapping[str, ValueState], dim: int = 0) -> Tree:
    """`tree`, of whose cotangents each holds what is said, as `assert_sharding`: for the operands of a kernel."""
    return _returning(tree, tuple(holds.items()), dim) if holds and current_layout() is not None else tree


def check_sharding(tree: Tree, holds: Mapping[str, tuple[ValueState, ...]], label: str) -> Tree:
    """`tree`, which is wrong where one of its arrays holds something else along an axis that is named.

    Args:
        label: What it is, as an error says it: "the gradient of blocks.w_up".
    """
    return _marked(tree, ShardingMark.EXPECTED, tuple(holds.items()), label)


def mark_shared_cotangent(x: jax.Array, axes: MeshAxes) -> jax.Array:
    """`x`, a cotangent computed alike on the devices along `axes` and divided by their number: a term on each."""
    return _marked(x, ShardingMark.SHARED, tuple((axis, (ValueState.PARTIAL,)) for axis in axes), "")


def linear_in(x: jax.Array, operand: jax.Array) -> jax.Array:
    """Mark `x` as linear in `operand`, though its operations are not: where that is a term of a sum over devices, so is `x`."""
    layout = current_layout()
    axes = () if layout is None else tuple((axis, ()) for axis, size in layout.sizes.items() if size > 1)
    return mark_p.bind(x, operand, mark=ShardingMark.LINEAR, holds=axes, label="", dim=0) if axes else x


def _marked(
    tree: Any, mark: ShardingMark, holds: tuple[tuple[str, tuple[ValueState, ...]], ...], label: str, dim: int = 0
) -> Any:
    layout = current_layout()
    holds = () if layout is None else tuple((axis, what) for axis, what in holds if layout.sizes.get(axis, 1) > 1)
    if not holds:
        return tree
    return jax.tree.map(lambda x: mark_p.bind(x, mark=mark, holds=holds, label=label, dim=dim), tree)
