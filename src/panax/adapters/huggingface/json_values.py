"""Types of JSON values, and objects inside objects."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

WrittenConfig = tuple[dict[str, Any], list[str]]
"""A part of config.json, and why it can't express the model, a line for each reason."""

RefuseFn = Callable[[str, str], NoReturn]
"""Function that raises an error about a key, with the reason."""


def is_json(value: Any, kind: type) -> bool:
    """Return True if a JSON value is of this type: an int is a float too, but a bool is not a number."""
    if isinstance(value, bool):
        return kind is bool
    return isinstance(value, (int, float) if kind is float else kind)


def flatten_keys(raw: Mapping[str, Any], nested: Sequence[str]) -> dict[str, Any]:
    """Move the values inside the objects at these keys to the top level, under dotted names.

    >>> flatten_keys({"a": 1, "b": {"c": {"d": 2}}}, ["b"])
    {'a': 1, 'b.c.d': 2}
    """
    flat: dict[str, Any] = {}
    for key, value in raw.items():
        if key in nested and isinstance(value, dict):
            inside = flatten_keys(value, [name for name, inner in value.items() if isinstance(inner, dict)])
            flat |= {f"{key}.{name}": inner for name, inner in inside.items()}
        else:
            flat[key] = value
    return flat


def unflatten_keys(flat: Mapping[str, Any]) -> dict[str, Any]:
    """Invert `flatten_keys`.

    >>> unflatten_keys({"a": 1, "b.c.d": 2})
    {'a': 1, 'b': {'c': {'d': 2}}}
    """
    raw: dict[str, Any] = {}
    for key, value in flat.items():
        *outer, name = key.split(".")
        inside = raw
        for part in outer:
            inside = inside.setdefault(part, {})
        inside[name] = value
    return raw
