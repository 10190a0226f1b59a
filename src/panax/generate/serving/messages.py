"""Messages of a chat in OpenAI's interface, in the form of chat templates."""

from collections.abc import Mapping
from typing import Any

from ...core.errors import RecipeError
from ...system import json_reader

_FORM = 'expected a list of objects with role and content, such as {"role": "user", "content": "..."}'


def read_messages(messages: Any) -> list[dict[str, Any]]:
    """Read the messages of a chat. Those of the role `tool` have results, and an assistant's may have `tool_calls`
    instead of a content.

    Raises:
        RecipeError: A message is of another form.
    """
    if not isinstance(messages, list) or not messages:
        raise RecipeError(f"messages: {_FORM}")
    return [_read_message(message, f"messages[{number}]") for number, message in enumerate(messages)]


def _read_message(message: Any, name: str) -> dict[str, Any]:
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
        raise RecipeError(f"{name}: {_FORM}")
    calls = message.get("tool_calls") or []
    if calls and message["role"] != "assistant":
        raise RecipeError(
            f"{name} of the role {message['role']!r} has tool_calls; expected them in an assistant's message"
        )
    content = message.get("content")
    if content is None and calls:
        content = ""
    if not isinstance(content, str):
        raise RecipeError(f"{name}.content is not a text; {_FORM}")
    # Clients send back what they got, with fields that are null.
    fields = {key: value for key, value in message.items() if value is not None and key != "tool_calls"}
    if not isinstance(calls, list):
        raise RecipeError(f"{name}.tool_calls: expected a list of calls")
    read = [_read_call(call, f"{name}.tool_calls[{number}]") for number, call in enumerate(calls)]
    return fields | {"content": content} | ({"tool_calls": read} if read else {})


def _read_call(call: Any, name: str) -> dict[str, Any]:
    """Return a call with its arguments as an object, as templates take them; clients have them as text."""
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise RecipeError(f'{name}: expected {{"type": "function", "function": {{"name": ..., "arguments": ...}}}}')
    arguments = function.get("arguments") or "{}"
    if isinstance(arguments, str):
        try:
            arguments = json_reader.parse_as(dict, arguments)
        except json_reader.JsonError as error:
            raise RecipeError(f"{name}.function.arguments: expected a JSON object; {error}") from error
    if not isinstance(arguments, Mapping):
        raise RecipeError(f"{name}.function.arguments: expected a JSON object")
    return {**call, "function": {**function, "arguments": dict(arguments)}}
