"""Records of preference pairs: a prompt with a chosen and a rejected answer, texts or lists of messages."""

import dataclasses
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from ..chats.conversation import ANSWER, make_conversation
from ..chats.layouts import OPTIONS
from ..files.files import BadRecordError
from ..text.corpus import Document

PAIR_FIELDS = ("prompt", "chosen", "rejected", "tools", OPTIONS, "completion", "label")
"""Fields that pairs are read from, and those of labeled answers, to recognize them."""

ANSWERS = ("chosen", "rejected")

_NAMES = re.compile(rb'[{,]\s*"(chosen|rejected)"\s*:')
_EXPECTED = "expected chosen and rejected, and prompt, each a string or a list of messages"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PreferencePair(Document):
    """A prompt with two answers; as a document, its text is that of both.

    Attributes:
        chosen: The preferred answer after the prompt: a text, or a conversation.
        rejected: The other one.
    """

    chosen: Document
    rejected: Document


def is_pair_record(begin: bytes) -> bool:
    r"""Return True if JSON records with this beginning are pairs.

    >>> is_pair_record(b'{"prompt": "a", "chosen": "b", "rejected": "c"}'), is_pair_record(b'{"chosen": 1}')
    (True, False)
    """
    return {name.decode() for name in _NAMES.findall(begin)} == set(ANSWERS)


def read_pair(record: Any, where: str) -> PreferencePair:
    """Convert a record to a pair.

    Without `prompt`, the prompt is what both answers begin with: whole messages, or the text up to a word's beginning.

    Raises:
        BadRecordError: The record is not a pair, or its answers are equal.

    >>> pair = read_pair({"prompt": "2 + 2 =", "chosen": " 4", "rejected": " 5"}, "line 1")
    >>> pair.chosen.prompt, pair.chosen.text, pair.rejected.text
    ('2 + 2 =', ' 4', ' 5')
    """
    if not isinstance(record, Mapping):
        raise BadRecordError(where, f"the record is {type(record).__name__}; {_EXPECTED}")
    missing = [name for name in ("chosen", "rejected") if record.get(name) is None]
    if len(missing) == 2 and record.get("completion") is not None and record.get("label") is not None:
        raise BadRecordError(
            where,
            "it has completion and label, which are those of a labeled answer: read it with data.LabeledAnswers, for models.Kto",
        )
    if missing:
        raise BadRecordError(where, f"{describe_fields(record, missing)}; {_EXPECTED}")
    prompt, chosen, rejected = record.get("prompt"), record["chosen"], record["rejected"]
    kinds = {
        name: describe_kind(record[name], name, where, _EXPECTED)
        for name in ("prompt", "chosen", "rejected")
        if record.get(name) is not None
    }
    if len(set(kinds.values())) > 1 and kinds != {"prompt": "messages", "chosen": "text", "rejected": "text"}:
        listed = ", ".join(f"{name} is {kind}" for name, kind in kinds.items())
        raise BadRecordError(where, f"{listed}; expected all three as texts, or all as lists of messages")
    if chosen == rejected:
        raise BadRecordError(
            where, "chosen and rejected are equal, so there is no preference to learn; remove the pair"
        )
    if "text" in kinds.values() and kinds.get("prompt") != "messages":
        start = prompt if prompt is not None else _common_text(chosen, rejected)
        cut = 0 if prompt is not None else len(start)
        texts = (Document(text=text[cut:], prompt=start, where=where) for text in (chosen, rejected))
        return _pair(texts, where)
    answers = [_messages(answer) for answer in (chosen, rejected)]
    start = list(prompt) if prompt is not None else _common_messages(*answers)
    cut = 0 if prompt is not None else len(start)
    conversations = (
        make_conversation(
            [*start, *answer[cut:]],
            where=where,
            tools=record.get("tools"),
            options=record.get(OPTIONS),
            first_trained=len(start),
        )
        for answer in answers
    )
    return _pair(conversations, where)


def _pair(halves: Iterable[Document], where: str) -> PreferencePair:
    chosen, rejected = halves
    return PreferencePair(
        text=f"{chosen.text}\n{rejected.text}", prompt=chosen.prompt, where=where, chosen=chosen, rejected=rejected
    )


def describe_fields(record: Mapping[str, Any], missing: Sequence[str]) -> str:
    """Describe the fields that a record lacks, and those that it has."""
    fields = ", ".join(repr(name) for name, value in record.items() if value is not None) or "none"
    return f"no field {' and '.join(map(repr, missing))}; it has {fields}"


def describe_kind(value: Any, name: str, where: str, expected: str) -> str:
    """Return "text" or "messages".

    Raises:
        BadRecordError: The value is neither.
    """
    if isinstance(value, str):
        return "text"
    if isinstance(value, Sequence) and all(isinstance(message, Mapping) for message in value):
        return "messages"
    raise BadRecordError(where, f"{name} is {type(value).__name__}; {expected}")


def _messages(answer: Any) -> list[Any]:
    return [{"role": ANSWER, "content": answer}] if isinstance(answer, str) else list(answer)


def _common_text(chosen: str, rejected: str) -> str:
    """Return what two texts begin with, without the space before the first word that differs.

    >>> _common_text("the oak", "the old ash"), _common_text("a b", "a c")
    ('the', 'a')
    """
    length = next((at for at, (one, other) in enumerate(zip(chosen, rejected)) if one != other), None)
    length = min(len(chosen), len(rejected)) if length is None else length
    while length > 0 and not chosen[length - 1].isspace():
        length -= 1
    while length > 0 and chosen[length - 1].isspace():
        length -= 1
    return chosen[:length]


def _common_messages(chosen: list[Any], rejected: list[Any]) -> list[Any]:
    """Return the messages that two conversations begin with; the last message is an answer in any case."""
    length = next((at for at, (one, other) in enumerate(zip(chosen, rejected)) if one != other), None)
    length = min(len(chosen), len(rejected)) if length is None else length
    return chosen[: min(length, len(chosen) - 1, len(rejected) - 1)]
