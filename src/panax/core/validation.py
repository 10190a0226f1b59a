"""Settings that are validated on construction, whether in a recipe, on the command line, from a checkpoint or
in a notebook.

A plain dataclass accepts any value: `norm="rmsnorm"` would silently train a different model.
"""

import dataclasses
import functools
import inspect
import math
import numbers
import types
import typing
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, Literal, Union, get_args, get_origin

import numpy as np

from .errors import RecipeError, describe_type, suggest_name


class Validated:
    """Base of frozen dataclasses that checks each field against its annotation before the class's own
    `__post_init__`.

    Strings must be values of the annotated `Literal`, and floats finite. Lists are converted to tuples if the
    annotation is a tuple, and NumPy scalars to Python's. Annotations that cannot be checked (`Any`, arrays,
    protocols) are left to the class.
    """

    infinite_fields: ClassVar[frozenset[str]] = frozenset()
    """Fields in which a value may be infinite."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        post_init = cls.__dict__.get("__post_init__")
        if post_init is not None:

            @functools.wraps(post_init)
            def checked_first(self: Any) -> None:
                check_fields(self)
                # The class's own message for a value that is too large takes precedence.
                post_init(self)
                check_finite(self)

            cls.__post_init__ = checked_first  # pyright: ignore[reportAttributeAccessIssue]

    def __post_init__(self) -> None:
        check_fields(self)
        check_finite(self)


def check_finite(settings: Any) -> None:
    """Check that no field of a dataclass is infinite.

    Raises:
        RecipeError: A field is infinite; the message names it.
    """
    for field in dataclasses.fields(settings):
        value = getattr(settings, field.name)
        items = value if isinstance(value, tuple) else (value,)
        infinite = any(isinstance(item, float) and math.isinf(item) for item in items)
        if infinite and field.name not in settings.infinite_fields:
            raise RecipeError(f"{type(settings).__name__}.{field.name}={_shown(value)}: expected a finite number")


def check_fields(settings: Any) -> None:
    """Check a dataclass's fields against their annotations, converting lists and NumPy scalars.

    Raises:
        RecipeError: A field does not match; the message names the field, the expected type and the nearest
            allowed string.
    """
    hints = _hints(type(settings))
    for field in dataclasses.fields(settings):
        value = getattr(settings, field.name)
        if field.name not in hints:
            continue
        converted = _convert(value, hints[field.name])
        problem = _problem(converted, hints[field.name])
        if problem is not None:
            raise RecipeError(f"{type(settings).__name__}.{field.name}={_shown(value)}: {problem}")
        if converted is not value:
            object.__setattr__(settings, field.name, converted)


@functools.cache
def _hints(cls: type) -> dict[str, Any]:
    return typing.get_type_hints(cls)


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


def _convert(value: Any, hint: Any) -> Any:
    """Convert NumPy scalars to Python's, and lists to tuples if the annotation has one."""
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, list) and any(get_origin(each) is tuple or each is tuple for each in _alternatives(hint)):
        return tuple(value)
    return value


def _alternatives(hint: Any) -> tuple[Any, ...]:
    return get_args(hint) if get_origin(hint) in (Union, types.UnionType) else (hint,)


def _problem(value: Any, hint: Any) -> str | None:
    """Return a description of a value's error, and the fix; None if it is valid."""
    alternatives = _alternatives(hint)
    problems = [_problem_of_one(value, each) for each in alternatives]
    if None in problems:
        return None
    if isinstance(value, str):
        words = [word for each in alternatives if get_origin(each) is Literal for word in get_args(each)]
        if words:
            return f"{suggest_name(value, map(str, words))}" if any(map(str, words)) else f"expected one of {words}"
    said = [each for each, alternative in zip(problems, alternatives) if alternative is not type(None)]
    return str(said[0]) + (", or None" if type(None) in alternatives else "")


def _problem_of_one(value: Any, hint: Any) -> str | None:
    origin, arguments = get_origin(hint), get_args(hint)
    if origin is Literal:
        return (
            None
            if any(value is word or (type(value) is type(word) and value == word) for word in arguments)
            else (f"expected one of {', '.join(map(repr, arguments))}")
        )
    if hint is bool:
        return None if isinstance(value, bool) else "expected True or False"
    if hint is int:
        return (
            None if isinstance(value, numbers.Integral) and not isinstance(value, bool) else "expected a whole number"
        )
    if hint is float:
        return _problem_of_number(value)
    if hint is str:
        return None if isinstance(value, str) else "expected text"
    if hint is type(None):
        return None if value is None else "expected None"
    if origin is tuple or hint is tuple:
        return _problem_of_tuple(value, arguments)
    if origin in (Mapping, dict) or (isinstance(origin, type) and issubclass(origin, Mapping)):
        return _problem_of_mapping(value, arguments)
    if origin is Callable or hint is Callable or origin is type(Callable):
        return None if callable(value) else "expected a function"
    if inspect.isclass(hint) and origin is None:
        return _problem_of_class(value, hint)
    return None


def _problem_of_number(value: Any) -> str | None:
    if not isinstance(value, numbers.Real) or isinstance(value, bool):
        return "expected a number"
    return "expected a number, not NaN" if math.isnan(value) else None


def _problem_of_tuple(value: Any, arguments: tuple[Any, ...]) -> str | None:
    if isinstance(value, str):
        return f"expected a tuple, and this is text: write ({value!r},)"
    if not isinstance(value, tuple):
        alone = len(arguments) == 2 and arguments[1] is Ellipsis and _problem(value, arguments[0]) is None
        return "expected a tuple, and this is one of its items: write (item,)" if alone else "expected a tuple"
    if len(arguments) == 2 and arguments[1] is Ellipsis:
        problems = (_problem(each, arguments[0]) for each in value)
    elif arguments and len(arguments) != len(value):
        return f"expected a tuple of {len(arguments)}, not of {len(value)}"
    else:
        problems = (_problem(each, hint) for each, hint in zip(value, arguments))
    for each, problem in zip(value, problems):
        if problem is not None:
            return f"of its {_shown(each)}: {problem}"
    return None


def _problem_of_mapping(value: Any, arguments: tuple[Any, ...]) -> str | None:
    if not isinstance(value, Mapping):
        return "expected a mapping"
    for key, each in value.items():
        problem = _problem(key, arguments[0]) or _problem(each, arguments[1]) if len(arguments) == 2 else None
        if problem is not None:
            return f"at {key!r}: {problem}"
    return None


def _problem_of_class(value: Any, cls: type) -> str | None:
    try:
        if isinstance(value, cls):
            return None
    except TypeError:  # A protocol without runtime checks.
        return None
    if inspect.isclass(value):
        return f"expected {_a(cls)}, and this is a class: write {value.__name__}(...)"
    hint = getattr(cls, "hint_for", None)
    instead = hint(value) if hint is not None else None
    if instead is None and (inspect.isfunction(value) or inspect.ismethod(value)):
        return f"expected {_a(cls)}, and this is a function: write its result, {value.__name__}(...)"
    return f"expected {_a(cls)}, got {describe_type(value)}" + (f": {instead}" if instead else "")


def _a(cls: type) -> str:
    return f"{'an' if cls.__name__[0] in 'AEIOU' else 'a'} {cls.__name__}"
