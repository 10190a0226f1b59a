"""Layouts of conversations in records: OpenAI's messages, ShareGPT, Alpaca, and prompts with completions."""

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple

from ...system import json_reader
from ..files.files import BadRecordError
from .conversation import ANSWER, Conversation, make_conversation

_SHAREGPT_ROLES = {
    "human": "user",
    "user": "user",
    "gpt": ANSWER,
    "chatgpt": ANSWER,
    "bing": ANSWER,
    "bard": ANSWER,
    "model": ANSWER,
    ANSWER: ANSWER,
    "system": "system",
    "tool": "tool",
    "observation": "tool",
    "function_call": ANSWER,
}
_MESSAGE_FIELDS = ("messages", "conversations", "conversation")
OPTIONS = "chat_template_kwargs"
"""Field with a record's own variables for the template."""


class ChatLayout(NamedTuple):
    """A way to write conversations as records.

    Attributes:
        required: Sets of fields; a record with all fields of one set has this layout.
        optional: Further fields that are read.
        read: Function from a record and its location to the conversation.
    """

    required: tuple[tuple[str, ...], ...]
    optional: tuple[str, ...]
    read: Callable[[Mapping[str, Any], str], Conversation]

    def fits(self, names: Collection[str]) -> bool:
        """Return True if a record with these fields has this layout."""
        return any(all(name in names for name in fields) for fields in self.required)


def find_layout(names: Collection[str]) -> ChatLayout | None:
    """Return the layout of records with these fields; None if they hold no conversation.

    >>> find_layout({"instruction", "output"}) is LAYOUTS["alpaca"], find_layout({"text"})
    (True, None)
    """
    return next((layout for layout in LAYOUTS.values() if layout.fits(names)), None)


def read_conversation(record: Mapping[str, Any], where: str, field: str = "") -> Conversation:
    """Convert a record to a conversation.

    Args:
        field: The field with the messages; empty to recognize the layout by the record's fields.

    Raises:
        BadRecordError: The record holds no conversation.
    """
    twice = getattr(record, "twice", ())
    if twice:
        raise BadRecordError(
            where, f"field {min(twice)!r} stands twice in the record; expected it once: repair the record"
        )
    if field:
        if field not in record:
            raise BadRecordError(where, f"no field {field!r}; it has {_list(record)}: name another with field=")
        return _read_list(record, field, where)
    present = {name for name, value in record.items() if value is not None}
    layout = find_layout(present)
    if layout is None:
        raise BadRecordError(
            where,
            f"it holds no conversation: its fields are {_list(record)}; expected messages, conversations, prompt and completion, "
            f"or instruction and output, or the name of another field of messages in field=",
        )
    return layout.read(record, where)


_LIST = re.compile(rb'"(messages|conversations?)"\s*:\s*\[\s*\{')
_NAMES = re.compile(rb'[{,]\s*"(prompt|completion|instruction|output)"\s*:')


def is_chat_record(begin: bytes) -> bool:
    r"""Return True if JSON records with this beginning hold conversations. Quotes within texts are escaped, so names in
    a text don't count.

    >>> is_chat_record(b'{"messages": [{"role": "user"'), is_chat_record(b'{"text": "say \\"messages\\": [{"')
    (True, False)
    """
    names = {name.decode() for name in _NAMES.findall(begin)}
    return _LIST.search(begin) is not None or {"prompt", "completion"} <= names or {"instruction", "output"} <= names


def field_names(field: str = "") -> tuple[str, ...]:
    """Return all fields that conversations are read from; a file need not have them all."""
    layouts = [LAYOUTS["messages"]] if field else LAYOUTS.values()
    required = (field,) if field else (name for layout in layouts for fields in layout.required for name in fields)
    return tuple(dict.fromkeys([*required, *(name for layout in layouts for name in layout.optional)]))


def _read_messages(record: Mapping[str, Any], where: str) -> Conversation:
    return _read_list(record, next(name for name in _MESSAGE_FIELDS if record.get(name) is not None), where)


def _read_list(record: Mapping[str, Any], field: str, where: str) -> Conversation:
    """Read a list of messages, with `role` and `content`, or with ShareGPT's `from` and `value`."""
    messages = record[field]
    if isinstance(messages, str):
        messages = _parsed(messages, field, where)
    if isinstance(messages, Sequence) and messages and isinstance(messages[0], Mapping) and "from" in messages[0]:
        messages = [_from_sharegpt(message, number, where) for number, message in enumerate(messages)]
    system = record.get("system")
    if isinstance(system, str) and system and isinstance(messages, Sequence):
        messages = [{"role": "system", "content": system}, *messages]
    return make_conversation(messages, where=where, tools=record.get("tools"), options=record.get(OPTIONS))


def _parsed(text: str, field: str, where: str) -> Any:
    try:
        return json_reader.parse(text)
    except ValueError as error:
        raise BadRecordError(
            where, f"field {field!r} is a text that is not JSON ({error}); expected messages"
        ) from None


def _from_sharegpt(message: Any, number: int, where: str) -> dict[str, Any]:
    sender = message.get("from") if isinstance(message, Mapping) else None
    role = _SHAREGPT_ROLES.get(sender) if isinstance(sender, str) else None
    if role is None or "value" not in message:
        raise BadRecordError(
            where, f"message {number} is from {sender!r}; expected from {', '.join(_SHAREGPT_ROLES)}, and a value"
        )
    rest = {name: value for name, value in message.items() if name not in ("from", "value")}
    if sender == "function_call":
        call = _parsed(message["value"], "value", where) if isinstance(message["value"], str) else message["value"]
        calls = call if isinstance(call, list) else [call]
        return {**rest, "role": role, "tool_calls": [{"type": "function", "function": each} for each in calls]}
    return {**rest, "role": role, "content": message["value"]}


def _read_alpaca(record: Mapping[str, Any], where: str) -> Conversation:
    """Read an instruction, which may have an input below it, and its output; earlier turns stand in `history`."""
    instruction, extra = record["instruction"], record.get("input")
    messages = [{"role": "system", "content": record["system"]}] if record.get("system") else []
    for turn in record.get("history") or ():
        if not isinstance(turn, Sequence) or isinstance(turn, str) or len(turn) != 2:
            raise BadRecordError(where, f"history holds {turn!r}; expected pairs of an instruction and an answer")
        messages += [{"role": "user", "content": turn[0]}, {"role": ANSWER, "content": turn[1]}]
    question = (
        f"{instruction}\n{extra}" if isinstance(instruction, str) and isinstance(extra, str) and extra else instruction
    )
    messages += [{"role": "user", "content": question}, {"role": ANSWER, "content": record["output"]}]
    return make_conversation(messages, where=where, tools=record.get("tools"), options=record.get(OPTIONS))


def _read_completion(record: Mapping[str, Any], where: str) -> Conversation:
    """Read a prompt and a completion, texts or lists of messages; only the completion's answers carry loss."""
    prompt = _turns(record["prompt"], "user")
    completion = _turns(record["completion"], ANSWER)
    return make_conversation(
        [*prompt, *completion],
        where=where,
        tools=record.get("tools"),
        options=record.get(OPTIONS),
        first_trained=len(prompt),
    )


def _turns(value: Any, role: str) -> Sequence[Any]:
    return [{"role": role, "content": value}] if isinstance(value, str) or not isinstance(value, Sequence) else value


def _list(record: Mapping[str, Any]) -> str:
    return ", ".join(map(repr, record)) or "none"


LAYOUTS: Mapping[str, ChatLayout] = {
    "messages": ChatLayout(tuple((name,) for name in _MESSAGE_FIELDS), ("tools", "system", OPTIONS), _read_messages),
    "completion": ChatLayout((("prompt", "completion"),), ("tools", OPTIONS), _read_completion),
    "alpaca": ChatLayout((("instruction", "output"),), ("input", "system", "history", "tools", OPTIONS), _read_alpaca),
}
"""All layouts by name; ShareGPT's is a form of messages."""
