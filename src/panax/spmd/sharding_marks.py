"""Assertions about the sharding of values, read by the static check of a traced step (`checking/`).

A mark is an identity and lowers to nothing. It is placed where the author knows more than the check can infer
operation by operation: that a custom kernel's result is split like its operands, that the gradients of a
schedule are partial sums, or that a step will reduce a gradient. Marks belong inside custom derivatives or
after a gradient; a tangent passes through unmarked.
"""

import enum
import functools
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import jax

from ..core.jax_primitives import define_primitive, read_parameter
from ..core.layout.layout import MeshAxes, current_layout

Tree = TypeVar("Tree")


class ValueState(enum.Enum):
    """State of a value along a mesh axis: how the devices' values relate."""

    WHOLE = "whole"
    """Equal on all devices."""
    SPLIT = "split"
    """A part of an array; a sum over its elements is a term of the sum over the whole array."""
    OWN = "own"
    """Independent on each device; sums over its elements are not partial sums over devices."""
    PARTIAL = "partial"
    """A partial sum: the intended value is the sum over devices."""
    UNKNOWN = "unknown"
    """Unknown to the check, which does not track the value."""


class ShardingMark(enum.Enum):
    """Kind of mark: asserted without a check, checked, a cotangent divided among devices, or sums of rows by
    segment.
    """

    DECLARED = "declared"
    EXPECTED = "expected"
    SHARED = "shared"
    SEGMENT_SUMS = "segment_sums"


mark_p = define_primitive(
    "spmd_mark",
    compute=lambda x, *_, **params: x,
    infer=lambda x, *_, **params: x,
    batch=lambda xs, dims, *, dim, **params: (mark_p.bind(*xs, dim=dim + (dims[0] <= dim), **params), dims[0]),
    differentiate=lambda primals, tangents, **params: (mark_p.bind(*primals, **params), tangents[0]),
)


class MarkParams(NamedTuple):
    """Parameters of a mark in a traced program.

    Attributes:
        states: Mesh axis to the allowed states.
        label: For a checked value, its name in error messages.
        dim: Dimension along which split arrays are split.
    """

    mark: ShardingMark
    states: Mapping[str, tuple[ValueState, ...]]
    label: str
    dim: int


def read_mark(equation: Any) -> MarkParams | None:
    """Return the parameters of a mark; None for an equation of any other primitive."""
    if equation.primitive is not mark_p:
        return None
    mark, holds, label, dim = (read_parameter(equation, name) for name in ("mark", "holds", "label", "dim"))
    return MarkParams(mark, dict(holds), label, dim)


def assert_sharding(tree: Tree, holds: Mapping[str, ValueState], dim: int = 0) -> Tree:
    """Assert the state of each array of `tree` along the named mesh axes, overriding what the check inferred.

    Args:
        holds: Mesh axis to state.
        dim: Dimension along which split arrays are split.

    >>> float(assert_sharding(jax.numpy.float32(1.0), {"tensor": ValueState.PARTIAL}))
    1.0
    """
    return _marked(tree, ShardingMark.DECLARED, tuple((axis, (state,)) for axis, state in holds.items()), "", dim)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1, 2))
def _returning(tree: Any, holds: tuple[tuple[str, ValueState], ...], dim: int) -> Any:
    return tree


_returning.defvjp(
    lambda tree, holds, dim: (tree, None),
    lambda holds, dim, _, gradient: (assert_sharding(gradient, dict(holds), dim),),
)


def assert_split(tree: Tree, places: Sequence[MeshAxes]) -> Tree:
    """Assert that each array of `tree` is split over the mesh axes named for each dimension, as
    `assert_sharding`.
    """
    for dim, axes in enumerate(places):
        tree = assert_sharding(tree, dict.fromkeys(axes, ValueState.SPLIT), dim)
    return tree


def assert_cotangent_sharding(tree: Tree, holds: Mapping[str, ValueState], dim: int = 0) -> Tree:
    """Assert the state of each cotangent of `tree`, as `assert_sharding`; for the operands of a kernel."""
    return _returning(tree, tuple(holds.items()), dim) if holds and current_layout() is not None else tree


def check_sharding(tree: Tree, holds: Mapping[str, tuple[ValueState, ...]], label: str) -> Tree:
    """Check that each array of `tree` has one of the allowed states along every named mesh axis; return
    `tree`.

    The check is static: `check_program` reports a violation when the step is traced.

    Args:
        holds: Mesh axis to the allowed states.
        label: Name of the value in the error message, such as "the gradient of blocks.w_up".
    """
    return _marked(tree, ShardingMark.EXPECTED, tuple(holds.items()), label)


def mark_shared_cotangent(x: jax.Array, axes: MeshAxes) -> jax.Array:
    """Mark a cotangent that was computed alike on the devices along `axes` and divided by their count, and is
    therefore partial."""
    return _marked(x, ShardingMark.SHARED, tuple((axis, (ValueState.PARTIAL,)) for axis in axes), "")


def mark_segment_sums(sums: jax.Array, rows: jax.Array, segment: jax.Array) -> jax.Array:
    """Mark `sums` as the sums of rows by segment, whatever operations computed them: of rows that devices have different ones
    of, they are partial sums."""
    layout = current_layout()
    axes = () if layout is None else tuple((axis, ()) for axis, size in layout.sizes.items() if size > 1)
    if not axes:
        return sums
    return mark_p.bind(sums, rows, segment, mark=ShardingMark.SEGMENT_SUMS, holds=axes, label="", dim=0)


def _marked(
    tree: Any, mark: ShardingMark, holds: tuple[tuple[str, tuple[ValueState, ...]], ...], label: str, dim: int = 0
) -> Any:
    layout = current_layout()
    # Sorted: callers build it from sets of axes, and equal programs should be written alike.
    holds = () if layout is None else tuple(sorted(each for each in holds if layout.sizes.get(each[0], 1) > 1))
    if not holds:
        return tree
    return jax.tree.map(lambda x: mark_p.bind(x, mark=mark, holds=holds, label=label, dim=dim), tree)
