"""Logical axes for models that name none: from the kind and shape of a parameter, or from a user's patterns.

A weight of a linear layer has one dimension that tensor parallelism computes in parallel (`features`) and one
along which it is stored split (`width`); which is which alternates, so that a layer that widens is followed
by one that narrows without a collective between them. Both are elective: a mesh axis that does not divide a
dimension is skipped.
"""

import fnmatch
import re
from collections.abc import Callable, Mapping
from typing import Literal

from ..core import Axes
from ..core.errors import RecipeError, suggest_name
from ..mesh.rules import LOGICAL_AXES
from ..optim.parameter import matrix_dims

Kind = Literal[
    "in_out", "out_in", "embedding", "convolution_first", "convolution_last", "members_in_out", "members_out_in"
]
"""Kind of a parameter: a matrix by the order of its dimensions, an embedding of rows, a convolution's filter
with its output channels first or last, or stacked matrices of many experts or layers."""

ROW_PARALLEL_PATTERN = re.compile(
    r"(^|[._/])(o_proj|out_proj|down_proj|c_proj|fc2|w2|wo|dense_4h_to_h|lin2|linear2|proj|proj_out|output[._/]dense|out|dense_1|down|"
    r"mlp[._/]2|net[._/]2|o|attn_out|attention[._/]output)([._/]|$)"
)
"""Paths of layers that narrow after a layer that widened, by their usual names in the field."""


VECTOR_PATTERN = re.compile(
    r"(^|[._/])(bias|b|scale|gamma|beta|offset)$|norm\w*[._/](weight|w)$|(^|[._/])ln\w*[._/](weight|w)$", re.IGNORECASE
)
"""Paths of biases and norms, by their usual names in the field: several stacked ones are not a matrix."""


def infer_meaning_axes(path: str, shape: tuple[int, ...], kind: Kind | None = None, named: Axes | None = None) -> Axes:
    """Return the logical axes that describe a parameter's meaning, independent of its sharding.

    Args:
        named: The axes that the model names; used if they make it a matrix.

    >>> infer_meaning_axes("up.kernel", (64, 256), None, (None, None)), infer_meaning_axes("layers.norm.scale", (12, 256))
    (('width', 'features'), (None, None))
    """
    return named if named is not None and matrix_dims(named) is not None else infer_axes(path, shape, kind)


def infer_axes(path: str, shape: tuple[int, ...], kind: Kind | None = None) -> Axes:
    """Return the logical axes of one parameter.

    Args:
        path: Its dotted name.
        kind: None if only the shape is known: a matrix maps its first dimension to its second, as in JAX
            libraries, and of more dimensions the last one counts as the output.

    >>> infer_axes("mlp.up.kernel", (64, 256)), infer_axes("mlp.down_proj.kernel", (256, 64)), infer_axes("norm.scale", (64,))
    (('width', 'features'), ('features', 'width'), (None,))
    >>> infer_axes("layer1.conv.weight", (128, 64, 3, 3), "convolution_first")
    ('features', 'width', None, None)
    """
    ndim = len(shape)
    if ndim < 2:
        return (None,) * ndim
    if kind is None and VECTOR_PATTERN.search(path):
        return (None,) * ndim
    if kind is None:
        kind = "in_out" if ndim == 2 else "convolution_last"
    narrows = bool(ROW_PARALLEL_PATTERN.search(path)) or (kind in ("in_out", "out_in") and _much_narrower(shape, kind))
    if kind == "embedding":
        return ("features", "width", *(None,) * (ndim - 2))
    inner, outer = ("features", "width") if narrows else ("width", "features")
    if kind in ("out_in", "convolution_first"):
        return (outer, inner, *(None,) * (ndim - 2))
    if kind == "members_out_in":
        return ("member", *(None,) * (ndim - 3), outer, inner)
    if kind == "members_in_out":
        return ("member", *(None,) * (ndim - 3), inner, outer)
    return (*(None,) * (ndim - 2), inner, outer)


def _much_narrower(shape: tuple[int, ...], kind: Kind) -> bool:
    outputs, inputs = (shape[0], shape[1]) if kind == "out_in" else (shape[-1], shape[-2])
    return inputs >= 2 * outputs


def automatic_axes(
    shapes: Mapping[str, tuple[int, ...]],
    kind_of: Callable[[str], Kind | None],
    named: Mapping[str, Axes],
    sharding: Mapping[str, Axes],
) -> dict[str, Axes]:
    """Return the logical axes of parameters, by name.

    Args:
        named: Axes of the parameters for which the model names them.
        sharding: Patterns of paths (`*` matches any text, dots included) to the axes of the matching parameters;
            the first match wins.

    Raises:
        RecipeError: A pattern matches no parameter, or only parameters that earlier patterns match; names an axis
            that does not exist; or has another number of dimensions.
    """
    used: set[str] = set()
    axes: dict[str, Axes] = {}
    for path, shape in shapes.items():
        pattern = next((pattern for pattern in sharding if fnmatch.fnmatchcase(path, pattern)), None)
        if pattern is None:
            axes[path] = named[path] if path in named else infer_axes(path, shape, kind_of(path))
        else:
            used.add(pattern)
            axes[path] = _checked(pattern, tuple(sharding[pattern]), path, shape)
    for pattern in sharding:
        if pattern not in used:
            raise RecipeError(
                f"sharding[{pattern!r}] matches no parameter that no pattern before it matches; "
                f"{suggest_name(pattern.replace('*', ''), shapes)}"
            )
    return axes


def _checked(pattern: str, axes: Axes, path: str, shape: tuple[int, ...]) -> Axes:
    for axis in axes:
        if axis is not None and axis not in LOGICAL_AXES:
            raise RecipeError(f"sharding[{pattern!r}] names the axis {axis!r}; {suggest_name(axis, LOGICAL_AXES)}")
    if len(axes) != len(shape):
        raise RecipeError(
            f"sharding[{pattern!r}] has {len(axes)} axes, and {path} has {len(shape)} dimensions {list(shape)}; pass one axis "
            f"(or None) for each"
        )
    return axes
