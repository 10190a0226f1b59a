"""Descriptions of Python functions as tools, and calls of them with the arguments that a model writes."""

import inspect
import re
import types
from collections.abc import Callable, Mapping
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

HIDDEN = ("record", "state")
"""Parameters that the model does not see: the prompt's record, and the episode's state, which the tool may change."""

_TYPES: Mapping[Any, str] = {
    str: "string", int: "integer", float: "number", bool: "boolean", list: "array", dict: "object",
}  # fmt: skip
_ACCEPTED: Mapping[str, tuple[type, ...]] = {
    "string": (str,), "integer": (int,), "number": (int, float), "boolean": (bool,), "array": (list,), "object": (dict,),
    "null": (type(None),),
}  # fmt: skip
_ARGUMENT = re.compile(r"^(\s+)\*{0,2}(\w+)(?:\s*\([^)]*\))?:\s*(.*)$")


class InvalidFunctionError(ValueError):
    """A function that can't be called as its kind demands; the message is a sentence."""


def describe_tool(function: Callable[..., Any], where: str) -> dict[str, Any]:
    """Return the description of a function in OpenAI's form, from its annotations and its docstring.

    The docstring's first paragraph describes the tool, and its section `Args:` the parameters.

    Args:
        where: The function's location, for messages.

    Raises:
        InvalidFunctionError: A parameter has no annotation, or one that JSON has no type for.

    >>> def add(a: int, b: int = 0): "Add two numbers."
    >>> described = describe_tool(add, "here:add")["function"]
    >>> described["description"], described["parameters"]["required"]
    ('Add two numbers.', ['a'])
    """
    try:
        signature, hints = inspect.signature(function), get_type_hints(function)
    except (TypeError, ValueError, NameError) as error:
        raise InvalidFunctionError(f"the tool {where} has no readable signature: {error}") from None
    text, arguments = _read_docstring(inspect.getdoc(function) or "")
    properties: dict[str, Any] = {}
    required = []
    for name, parameter in signature.parameters.items():
        if name in HIDDEN:
            continue
        if parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
            raise InvalidFunctionError(
                f"the tool {where} has the parameter {parameter}; expected parameters with names alone: a model passes "
                f"arguments by name"
            )
        if name not in hints:
            raise InvalidFunctionError(
                f"the parameter {name!r} of the tool {where} has no annotation; give it one, such as {name}: str"
            )
        schema = _schema_of(hints[name])
        if schema is None:
            raise InvalidFunctionError(
                f"the parameter {name!r} of the tool {where} is annotated with {hints[name]}; expected str, int, float, bool, "
                f"list, dict, a Literal, or one of these or None"
            )
        properties[name] = schema | ({"description": arguments[name]} if name in arguments else {})
        if parameter.default is parameter.empty:
            required.append(name)
    parameters = {"type": "object", "properties": properties, "required": required}
    function_name = getattr(function, "__name__", "")
    return {
        "type": "function",
        "function": {"name": function_name, "description": text, "parameters": parameters},
    }


def bind_arguments(function: Callable[..., Any], request: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of a call: those of the model, and the record and the state if the function takes them.

    Args:
        request: `arguments` of the model, `record`, and `state`, an object.

    Raises:
        TypeError: The model's arguments don't fit.
    """
    signature, arguments = inspect.signature(function), request["arguments"]
    known = [name for name in signature.parameters if name not in HIDDEN]
    if unknown := [name for name in arguments if name not in known]:
        raise TypeError(f"unknown argument {unknown[0]!r}; expected {', '.join(known) or 'none'}")
    missing = [
        name
        for name in known
        if name not in arguments and signature.parameters[name].default is inspect.Parameter.empty
    ]
    if missing:
        raise TypeError(f"the argument {missing[0]!r} is missing")
    hints = get_type_hints(function)
    for name, value in arguments.items():
        schema = _schema_of(hints[name])
        if schema is not None and not _accepts(schema, value):
            raise TypeError(f"the argument {name!r} is {value!r}; expected {schema.get('enum') or schema['type']}")
    return {**arguments, **{name: request[name] for name in HIDDEN if name in signature.parameters}}


def _schema_of(annotation: Any) -> dict[str, Any] | None:
    origin, parts = get_origin(annotation), get_args(annotation)
    if annotation in _TYPES:
        return {"type": _TYPES[annotation]}
    if origin is Literal:
        return {"type": "string", "enum": list(parts)} if all(isinstance(each, str) for each in parts) else None
    if origin in (Union, types.UnionType):
        schemas = [_schema_of(part) for part in parts if part is not type(None)]
        if len(schemas) != 1 or schemas[0] is None or len(parts) != 2 or "enum" in schemas[0]:
            return None
        return schemas[0] | {"type": [schemas[0]["type"], "null"]}
    if origin is list:
        items = _schema_of(parts[0])
        return None if items is None else {"type": "array", "items": items}
    return {"type": "object"} if origin is dict else None


def _accepts(schema: Mapping[str, Any], value: Any) -> bool:
    """Return True if a value is of a schema's type."""
    names = schema["type"] if isinstance(schema["type"], list) else [schema["type"]]
    accepted = tuple(kind for name in names for kind in _ACCEPTED[name])
    # A bool is an int of Python, not of JSON.
    if not isinstance(value, accepted) or (isinstance(value, bool) and bool not in accepted):
        return False
    if "enum" in schema and value not in schema["enum"]:
        return False
    return (
        not isinstance(value, list) or "items" not in schema or all(_accepts(schema["items"], each) for each in value)
    )


def _read_docstring(text: str) -> tuple[str, dict[str, str]]:
    """Return the first paragraph of a docstring, and the descriptions of its section `Args:` by parameter."""
    head, _, rest = text.partition("Args:\n")
    described: dict[str, str] = {}
    last, indent = "", -1
    for line in rest.splitlines():
        if line.strip() and not line.startswith(" "):
            break  # another section
        matched = _ARGUMENT.match(line)
        if matched is not None and indent in (-1, len(matched[1])):
            indent, last = len(matched[1]), matched[2]
            described[last] = matched[3]
        elif last and line.strip():
            described[last] += f" {line.strip()}"
    return " ".join(head.strip().split("\n\n")[0].split()), described
