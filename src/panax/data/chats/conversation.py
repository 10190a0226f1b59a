"""`Conversation`: messages and tools in one form, independent of the file format."""

import dataclasses
import json
from collections.abc import Mapping, Sequence
from typing import Any

from ...system import json_reader
from ..files.files import BadRecordError
from ..text.corpus import Document

_THOUGHTS = ("reasoning_content", "thinking", "reasoning")

ANSWER = "assistant"
"""Role of the messages to learn."""

SPAN_BEGIN, SPAN_END = "\ufdd0", "\ufdd1"
"""Characters that mark answers while a template is rendered. Unicode reserves them for such use, so no text holds them."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Conversation(Document):
    """One conversation to train on; as a document, its text is that of all messages.

    Attributes:
        messages: Objects with `role`, `content` and other fields that the template reads.
        tools: Tools offered to the model, as JSON schemas.
        options: Further variables of the template, such as `enable_thinking`.
        trained: True for each message that carries loss.
    """

    messages: tuple[Mapping[str, Any], ...]
    tools: tuple[Any, ...] = ()
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    trained: tuple[bool, ...]


def make_conversation(
    messages: Any, *, where: str, tools: Any = None, options: Any = None, first_trained: int = 0
) -> Conversation:
    """Check messages and convert them to one form.

    A content of several text parts becomes one text, and an absent one an empty text; arguments of tool calls that are JSON
    in a string become objects, so that templates don't quote them twice. Thoughts are stored under each name that templates
    read. Null fields are removed. A message with `weight` 0 carries no loss.

    Args:
        tools: A list of schemas, or such a list as JSON in a string; None without tools.
        options: An object of template variables, or None.
        first_trained: Messages before this one carry no loss.

    Raises:
        BadRecordError: The messages are not a conversation.
    """
    if not isinstance(messages, Sequence) or isinstance(messages, str) or not messages:
        raise BadRecordError(
            where, f"the messages are {_describe(messages)}; expected a list of objects with role and content"
        )
    cleaned, trained = [], []
    for number, message in enumerate(messages):
        part = _check_message(message, number, where)
        weight = part.pop("weight", 1)
        if weight not in (0, 1):
            raise BadRecordError(where, f"message {number} has weight {weight!r}; expected 0 or 1")
        cleaned.append(part)
        trained.append(part["role"] == ANSWER and bool(weight) and number >= first_trained)
    if options is not None and not isinstance(options, Mapping):
        raise BadRecordError(where, f"chat_template_kwargs is {_describe(options)}; expected an object")
    return Conversation(
        text="\n".join(part["content"] for part in cleaned),
        where=where,
        messages=tuple(cleaned),
        tools=tuple(_read_tools(tools, where)),
        options=_without_nulls(options or {}),
        trained=tuple(trained),
    )


def _check_message(message: Any, number: int, where: str) -> dict[str, Any]:
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
        shown = (
            _describe(message)
            if not isinstance(message, Mapping)
            else f"an object with {', '.join(map(repr, message)) or 'no field'}"
        )
        raise BadRecordError(where, f"message {number} is {shown}; expected an object with a role")
    content = _read_content(message.get("content"), number, where)
    rest = _without_nulls({name: value for name, value in message.items() if name != "content"})
    cleaned = {**rest, "content": content}
    # The same thoughts have three names; templates read the first, gpt-oss's the second.
    thoughts = next((cleaned[name] for name in _THOUGHTS if name in cleaned), None)
    if thoughts is not None:
        cleaned = {"thinking": thoughts, **cleaned, "reasoning_content": thoughts}
    if "tool_calls" in cleaned:
        cleaned["tool_calls"] = _read_tool_calls(cleaned["tool_calls"], number, where)
    _check_characters(cleaned, number, where)
    return cleaned


def _read_content(content: Any, number: int, where: str) -> str:
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if isinstance(content, Sequence):
        values = [part.get("text") if isinstance(part, Mapping) else part for part in content]
        texts = [text for text in values if isinstance(text, str)]
        if len(texts) == len(values):
            return "".join(texts)
        other = next(part for part, text in zip(content, values) if not isinstance(text, str))
        kind = other.get("type", "another part") if isinstance(other, Mapping) else _describe(other)
        raise BadRecordError(
            where, f"the content of message {number} holds {kind!r}; only text is trained on: remove it"
        )
    raise BadRecordError(where, f"the content of message {number} is {_describe(content)}; expected a string")


def _read_tool_calls(calls: Any, number: int, where: str) -> list[Any]:
    if not isinstance(calls, Sequence) or isinstance(calls, str):
        raise BadRecordError(where, f"tool_calls of message {number} is {_describe(calls)}; expected a list")
    return [_with_parsed_arguments(call) for call in calls]


def _with_parsed_arguments(call: Any) -> Any:
    if not isinstance(call, Mapping):
        return call
    if isinstance(call.get("function"), Mapping):
        return {**call, "function": _with_parsed_arguments(call["function"])}
    arguments = call.get("arguments")
    if not isinstance(arguments, str):
        return call
    try:
        parsed = json_reader.parse(arguments)
    except ValueError:
        return call
    return {**call, "arguments": parsed} if isinstance(parsed, dict) else call


def _read_tools(tools: Any, where: str) -> Sequence[Any]:
    if isinstance(tools, str):
        try:
            tools = json_reader.parse(tools) if tools.strip() else None
        except ValueError as error:
            raise BadRecordError(
                where, f"tools is a text that is not JSON ({error}); expected a list of tools"
            ) from None
    if tools is None:
        return ()
    if not isinstance(tools, Sequence) or isinstance(tools, str):
        raise BadRecordError(where, f"tools is {_describe(tools)}; expected a list")
    return [_without_nulls(tool) for tool in tools]


def _without_nulls(value: Any) -> Any:
    """Remove null fields of objects at any depth: a Parquet file has the fields of all rows in each."""
    if isinstance(value, Mapping):
        return {name: _without_nulls(each) for name, each in value.items() if each is not None}
    if isinstance(value, list | tuple):
        return [_without_nulls(each) for each in value]
    return value


def _check_characters(message: Mapping[str, Any], number: int, where: str) -> None:
    text = json.dumps(message, ensure_ascii=False, default=str)
    if text.isascii():
        return
    try:
        text.encode()
    except UnicodeEncodeError as error:
        half = f"\\u{ord(text[error.start]):04x}"
        raise BadRecordError(where, f"message {number} holds {half}, half of a character; repair the text") from None
    if SPAN_BEGIN in text or SPAN_END in text:
        raise BadRecordError(where, f"message {number} holds U+FDD0 or U+FDD1, which are not characters; remove them")


def _describe(value: Any) -> str:
    kinds = {type(None): "null", str: "a text", bool: "a truth value", int: "a number", float: "a number"}
    return "an empty list" if value == [] else kinds.get(type(value), type(value).__name__)
