"""Axis names in a Flax model's metadata, read as Panax's logical axes."""

from collections.abc import Mapping
from typing import Any

from ..core import Axes
from ..core.errors import RecipeError, suggest_name
from ..mesh.rules import LOGICAL_AXES

AxisNames = Mapping[str, str | None]
"""The model's names of axes to Panax's; None for an axis that is never split."""


def read_names(named: Mapping[str, tuple[Any, ...]], axis_names: AxisNames) -> dict[str, Axes]:
    """Translate the axis names in a model's metadata to logical axes, by parameter.

    A name of one of Panax's logical axes stands for that axis, unless `axis_names` has an entry for it.

    Args:
        named: Parameter name to the model's names of its axes, one entry for each dimension.

    Raises:
        RecipeError: A name has no meaning in Panax, or no parameter uses an entry of `axis_names`.
    >>> read_names({"up.kernel": ("embed", "mlp")}, {"mlp": "ffn"})
    {'up.kernel': ('embed', 'ffn')}
    """
    used = {axis for axes in named.values() for axis in axes if axis is not None}
    for name, logical in axis_names.items():
        if name not in used:
            raise RecipeError(
                f"axis_names[{name!r}] is not an axis that the model names; {suggest_name(name, map(str, used))}"
                if used
                else f"axis_names names {name!r}, but the model's metadata names no axes; remove axis_names"
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
            f"{first}: the model calls its axes {', '.join(map(repr, unknown))}, which Panax does not know; map them "
            f"with axis_names={{{proposal}}}, each one of {', '.join(LOGICAL_AXES)}, or None for one that is never "
            f"split"
        )
    return {
        path: tuple(None if axis is None else axis_names.get(axis, axis) for axis in axes)
        for path, axes in named.items()
    }
