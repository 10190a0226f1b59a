"""Short representations: the fields of a dataclass that differ from their defaults."""

import dataclasses
from typing import Any

MAX_LENGTH = 60
"""Maximum characters of a value that is not a dataclass; longer ones are truncated."""


def format_value(value: Any) -> str:
    """Format a value as code, omitting default fields.

    >>> @dataclasses.dataclass
    ... class Layer:
    ...     width: int
    ...     bias: bool = True
    >>> format_value((Layer(3), Layer(4, bias=False)))
    '(Layer(width=3), Layer(width=4, bias=False))'
    """
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = (
            f"{field.name}={format_value(getattr(value, field.name))}"
            for field in dataclasses.fields(value)
            if field.repr and not _is_default(getattr(value, field.name), field)
        )
        return f"{type(value).__name__}({', '.join(fields)})"
    if isinstance(value, tuple) and not hasattr(value, "_fields"):
        return f"({', '.join(map(format_value, value))}{',' if len(value) == 1 else ''})"
    text = repr(value)
    return text if len(text) <= MAX_LENGTH else f"{text[: MAX_LENGTH - 4]} ..."


def _is_default(value: Any, field: dataclasses.Field[Any]) -> bool:
    if field.default is not dataclasses.MISSING:
        default = field.default
    elif field.default_factory is not dataclasses.MISSING:
        default = field.default_factory()
    else:
        return False
    try:
        return type(value) is type(default) and bool(value == default)
    except Exception:
        return value is default
