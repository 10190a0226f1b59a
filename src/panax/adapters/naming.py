"""The axis names that a Flax model's own metadata holds, read as Panax's logical axes."""

from collections.abc import Mapping
from typing import Any

from ..core import Axes
from ..core.errors import RecipeError, suggest_name
from ..mesh.rules import LOGICAL_AXES

AxisNames = Mapping[str, str | None]
"""What a model calls an axis, to what Panax calls it; None for an axis that is never split."""


def read_names(named: Mapping[str, tuple[Any, ...]], axis_names: AxisNames) -> dict[str, Axes]:
    """The logical axes of the parameters that a model names.

    A name that is one of Panax's own stands for itself, unless `axis_names` says otherwise.

    Args:
        named: Parameter name to what the model calls its axes, one entry for each dimension.

    Raises:
        RecipeError: A name means nothing to Panax, or an entry of `axis_names` is used by no parameter.

    >>> read_names({"up.kernel": ("embed", "mlp")}, {"mlp": "ffn"})
    {'up.kernel': ('embed', 'ffn')}
    """
    used = {axis for axes in named.values() for axis in axes if axis is not None}
    for name, logical in axis_names.items():
        if name not in used:
            raise RecipeError(
                f"axis_names[{name!r}] is not an axis that the model names; {suggest_name(name, map(str, used))}"
                if used
                else f"axis_names names {name!r}, and the model's metadata names no axes; leave axis_names out"
            )
        if logical is not None and logical not in LOGICAL_AXES:
            raise RecipeError(
                f"axis_names[{name!r}]={logical!r} is not a logical axis; {suggest_name(logical, LOGICAL_AXES)}"
            )
    unknown = sorted({str(axis) for axis in used if axis not in axis_names and axis not in LOGICAL_AXES})
    if unknown:
        proposal = ", ".join(f"{name!r}: ..." for name in unknown)
        first = next(path for path, axes in named.items() if unknown[0] in map(str, axes))
        raise RecipeError(
            f"{first}: the model calls its axes {', '.join(map(repr, unknown))}, which Panax does not know; say what they are, "
            f"axis_names={{{proposal}}}, each one of {', '.join(LOGICAL_AXES)}, or None for one that is never split"
        )
    return {
        path: tuple(None if axis is None else axis_names.get(axis, axis) for axis in axes)
        for path, axes in named.items()
    }
