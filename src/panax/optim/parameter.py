"""`Parameter`: the static description of a parameter from which optimizers choose its state and update."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from ..core.errors import RecipeError, suggest_name
from ..core.params.logical import LOGICAL_AXES, is_stack_axis
from ..core.protocols import Axes
from .decay import SAME_SPACE


@dataclasses.dataclass(frozen=True)
class Parameter:
    """An array, or a stack of arrays of one kind that are each optimized separately.

    Attributes:
        shape: The global shape.
        axes: The logical axes that determine its sharding.
        meaning: The logical axes that determine its role; empty if equal to `axes`.

    >>> up = Parameter("blocks.w_up", (12, 8, 64, 256), "float32", ("layer", "expert", "embed", "ffn"))
    >>> up.stack_dims, up.array_dims, up.matrix
    ((0, 1), (2, 3), ((2,), (3,)))
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    axes: Axes
    meaning: Axes = ()

    @classmethod
    def of(cls, name: str, leaf: Any, axes: Axes, meaning: Axes | None = None) -> "Parameter":
        meaning = () if meaning is None or tuple(meaning) == tuple(axes) else tuple(meaning)
        return cls(name, tuple(leaf.shape), leaf.dtype.name, tuple(axes), meaning)

    @property
    def semantic_axes(self) -> Axes:
        """The logical axes that determine its role."""
        return self.meaning or self.axes

    @property
    def stack_dims(self) -> tuple[int, ...]:
        """The stacking dimensions: layers, stages, experts."""
        return tuple(dim for dim, axis in enumerate(self.semantic_axes) if is_stack_axis(axis))

    @property
    def array_dims(self) -> tuple[int, ...]:
        """The dimensions of a single array of the stack."""
        return tuple(dim for dim, axis in enumerate(self.semantic_axes) if not is_stack_axis(axis))

    @property
    def matrix(self) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
        """The row (input) and column (output) dimensions; None if it is not a matrix.

        Axes that together index one space, such as heads and head_dim, count as one; an unnamed axis joins
        its neighbor. Of more than two spaces, all but the last are rows.
        """
        return matrix_dims(self.semantic_axes)


def matrix_dims(axes: Axes) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
    """Return `Parameter.matrix` for the given logical axes.

    >>> matrix_dims(("layer", "heads", "head_dim", "embed")), matrix_dims(("layer", "heads", "head_dim"))
    (((1, 2), (3,)), None)
    >>> matrix_dims(("features", "width", None, None)), matrix_dims((None, None, "width", "features"))
    (((0,), (1, 2, 3)), ((0, 1, 2), (3,)))
    """
    spaces: list[tuple[str | None, list[int]]] = []
    for dim, axis in enumerate(axes):
        if is_stack_axis(axis):
            continue
        space = SAME_SPACE.get(axis or "", axis)
        if spaces and (space is None or spaces[-1][0] in (space, None)):
            before, dims = spaces.pop()
            spaces.append((before or space, [*dims, dim]))
        else:
            spaces.append((space, [dim]))
    if len(spaces) < 2:
        return None
    return tuple(dim for _, dims in spaces[:-1] for dim in dims), tuple(spaces[-1][1])


def check_excluded(excluded: tuple[str, ...], axes: Mapping[str, Axes]) -> None:
    """Check that every excluded logical axis exists; an unknown one would exclude nothing.

    Args:
        axes: Parameter name to logical axes, which may include axes that a model uses without registering
            them.

    Raises:
        RecipeError: An axis is unknown; the message names the nearest one.
    """
    known = {*LOGICAL_AXES, *(axis for each in axes.values() for axis in each if axis)}
    for axis in excluded:
        if axis not in known:
            raise RecipeError(
                f"optimizer.excluded: {axis!r} is not a logical axis; {suggest_name(axis, sorted(known))}"
            )
