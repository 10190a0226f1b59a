"""Conversion of a run's settings to JSON and back, so that the model of a checkpoint is known without running
any code.

Only registered classes (`core.serializable`) are ever built from a description; any other name is an error.
"""

import dataclasses
import typing
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from ...core import Task
from ...core.errors import CheckpointError, RecipeError
from ...core.former_names import with_present_names
from ...core.serializable import find_serializable, serializable_names
from ...system import json_reader
from .opaque import fingerprint_value

_LISTED = 32
"""Length of the longest list written out in full if it holds anything but text and numbers."""


def serialize_config(value: Any) -> Any:
    """Convert a dataclass and its contents to JSON values, each with its `type`; `opaque.py` names values
    JSON can't represent.

    Raises:
        RecipeError: A value contains text that is not UTF-8.
    """
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        saved = [field.name for field in dataclasses.fields(value) if field.metadata.get("saved", True)]
        fields = {name: serialize_config(getattr(value, name)) for name in saved}
        return {"type": type(value).__name__, **fields}
    if isinstance(value, Mapping):
        return {str(key): serialize_config(item) for key, item in value.items()}
    if isinstance(value, list | tuple) and not (len(value) > _LISTED and any(map(_is_opaque, value))):
        if hasattr(value, "_fields"):  # a named tuple of functions, as in optax
            return fingerprint_value(value)
        return [serialize_config(item) for item in value]
    if isinstance(value, str) and not _is_text(value):
        raise RecipeError(
            f"the settings hold {value!r}, which is not UTF-8, so a checkpoint can't record it: "
            f"rename the file or folder, or make a link to it with another name"
        )
    if value is None or isinstance(value, bool | int | float | str):
        return value
    return fingerprint_value(value)


def _is_text(value: str) -> bool:
    """Return False if `value` has lone surrogates, with which Python represents bytes of a file name that is
    not UTF-8."""
    try:
        return value.isascii() or bool(value.encode())
    except UnicodeEncodeError:
        return False


def _is_opaque(value: Any) -> bool:
    return not (value is None or isinstance(value, bool | int | float | str))


def deserialize_task(text: str, where: str) -> Task:
    """Build the task that a checkpoint's description names.

    Raises:
        CheckpointError: The description names a class or a field that this Panax can't build from a file.
    """
    try:
        described = with_present_names(json_reader.parse(text, constants=True))
    except ValueError as error:
        raise CheckpointError(f"{where} is not JSON: {error}") from error
    kind = described.get("type") if isinstance(described, dict) else described
    if not isinstance(kind, str) or find_serializable(kind) is None:
        hint = (
            ". In Python, fit of the same experiment resumes the run, and trains nothing if all steps are done; "
            "its result evaluates and generates"
        )
    else:
        hint = ""
    try:
        task = _build(described, where, find_serializable, serializable_names)
    except CheckpointError as error:
        raise CheckpointError(f"{error}{hint}") from error
    if not isinstance(task, Task):
        raise CheckpointError(f"{where} does not describe a task that can be built from a file: {str(text)[:80]}{hint}")
    return task


def deserialize_config(value: Any, where: str, classes: Mapping[str, type]) -> Any:
    """Build the value of a description, from these classes alone.

    Raises:
        CheckpointError: The description names another class, or a field that this Panax can't build.
    """
    return _build(with_present_names(value), where, classes.get, lambda: list(classes))


def _build(value: Any, where: str, find: Callable[[str], type | None], names: Callable[[], list[str]]) -> Any:
    if isinstance(value, list):
        return tuple(_build(item, where, find, names) for item in value)
    if not isinstance(value, dict):
        return value
    name = value.get("type")
    cls = find(name) if isinstance(name, str) else None
    if cls is None:
        raise CheckpointError(
            f"{where} describes a {name}; this command builds {', '.join(names())} from a file, and no other class"
        )
    fields = {field.name: field.type for field in dataclasses.fields(cls)}
    unknown = value.keys() - fields.keys() - {"type"}
    if unknown:
        raise CheckpointError(f"{where}: {name} has no field {sorted(unknown)[0]!r}; it was saved by a newer Panax")
    try:
        return cls(
            **{
                key: _plain_mapping(item) if _is_mapping(fields[key], item) else _build(item, where, find, names)
                for key, item in value.items()
                if key != "type"
            }
        )
    except (TypeError, ValueError) as error:
        raise CheckpointError(f"{where}: {error}") from error


def _is_mapping(declared: object, value: Any) -> bool:
    """Return True for plain values by name in a field that is declared as a mapping; any other object names its class."""
    return isinstance(value, dict) and typing.get_origin(declared) is Mapping and all(map(_is_plain, value.values()))


def _is_plain(value: Any) -> bool:
    return isinstance(value, int | float | str | None) or (isinstance(value, list) and all(map(_is_plain, value)))


def _plain_mapping(value: Mapping[str, Any]) -> dict[str, Any]:
    """Return a mapping with tuples in place of JSON's lists."""

    def frozen(item: Any) -> Any:
        return tuple(map(frozen, item)) if isinstance(item, list) else item

    return {key: frozen(item) for key, item in value.items()}


def diff_configs(old: Any, new: Any, prefix: str = "") -> Iterator[str]:
    """Yield one line for each setting that differs between two descriptions.

    >>> list(diff_configs({"a": {"b": 1}}, {"a": {"b": 2}}))
    ['a.b: 1 -> 2']
    """
    if isinstance(old, dict) and isinstance(new, dict):
        for key in sorted({*old, *new}):
            yield from diff_configs(old.get(key), new.get(key), f"{prefix}.{key}" if prefix else key)
    elif old != new:
        yield f"{prefix}: {old} -> {new}"
