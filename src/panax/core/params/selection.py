"""Selection of parameters by name prefix, by pattern, or by layer within stacked arrays."""

import fnmatch
import re
from collections.abc import Iterable, Mapping

from ..errors import RecipeError

_LAYERS = re.compile(r"layers\.(\d+)(?:-(\d+))?(?:\.(.+))?")

LayerParameters = Mapping[int, Mapping[str, tuple[str, int]]]
"""For each layer, parameter name within the layer to (name of the stacked array, the layer's index in it)."""

SelectedParams = Mapping[str, frozenset[int] | None]
"""Parameter name to the selected layer indices in its stack; None for the whole parameter."""


def select_params(pattern: str, names: Iterable[str], layers: LayerParameters, setting: str) -> SelectedParams:
    """Return the parameters that a pattern selects.

    Args:
        pattern: A name or a prefix of names (`embedding`), one with `*`, or single layers: `layers.3`,
            `layers.0-5`, `layers.3.attention`.
        layers: Where each layer's parameters are stacked; empty for a model without stacks.
        setting: Name of the setting with the pattern, with which errors begin.

    Raises:
        RecipeError: The pattern selects no parameter.

    >>> select_params("a", ["a.w", "a.b", "ab"], {}, "frozen")
    {'a.w': None, 'a.b': None}
    >>> select_params("*.b", ["a.w", "a.b", "ab"], {}, "frozen")
    {'a.b': None}
    """
    names = list(names)
    matching = [name for name in names if matches_param(name, pattern)]
    if matching:
        return dict.fromkeys(matching)
    rows: dict[str, set[int]] = {}
    for name, row in _select_layers(pattern, layers, names, setting):
        rows.setdefault(name, set()).add(row)
    return {name: frozenset(layer_indices) for name, layer_indices in rows.items()}


def matches_param(name: str, pattern: str) -> bool:
    """Return True if a parameter's name equals a pattern, is below it, or matches it if it contains `*`."""
    if "*" in pattern:
        return fnmatch.fnmatchcase(name, pattern)
    return name == pattern or name.startswith(pattern.rstrip(".") + ".")


def _select_layers(pattern: str, layers: LayerParameters, names: list[str], setting: str) -> list[tuple[str, int]]:
    """Return the stacked arrays, and the index in each, that a pattern `layers.N` selects."""
    match = _LAYERS.fullmatch(pattern.rstrip("."))
    if match is None or not layers:
        single = "; single layers are layers.0, layers.1-3, layers.0.attention" if layers else ""
        raise RecipeError(
            f"{setting}: {pattern!r} matches no parameter; the first ones are {', '.join(names[:5])}{single}"
        )
    first, last, inner = int(match[1]), int(match[2] or match[1]), match[3]
    absent = [layer for layer in range(first, last + 1) if layer not in layers]
    if absent or last < first:
        raise RecipeError(f"{setting}: {pattern!r}: the model has the layers {min(layers)} to {max(layers)}")
    known_names = set(names)
    chosen = [
        location
        for layer in range(first, last + 1)
        for name, location in layers[layer].items()
        if (inner is None or matches_param(name, inner)) and location[0] in known_names
    ]
    if not chosen:
        raise RecipeError(
            f"{setting}: {pattern!r} matches no parameter; layer {first} has {', '.join(dict.fromkeys(layers[first]))}"
        )
    return chosen
