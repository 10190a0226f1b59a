"""Records of labeled answers: a prompt with one answer, texts or lists of messages, and a label of good or bad."""

import dataclasses
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from ..chats.conversation import ANSWER, make_conversation
from ..chats.layouts import OPTIONS
from ..files.files import BadRecordError
from ..text.corpus import BadRecord, Document
from .pair_records import describe_fields, describe_kind

ANSWER_FIELDS = ("prompt", "completion", "label", "tools", OPTIONS, "chosen", "rejected")
"""Fields that answers are read from, and those of pairs, to recognize them."""

LABELED = ("prompt", "completion", "label")

_LABEL = re.compile(rb'[{,]\s*"label"\s*:\s*(true|false)')
_COMPLETION = re.compile(rb'[{,]\s*"completion"\s*:')
_EXPECTED = "expected prompt and completion, each a string or a list of messages, and label, true or false"


def is_labeled_record(begin: bytes) -> bool:
    r"""Return True if JSON records with this beginning are labeled answers.

    >>> is_labeled_record(b'{"prompt": "a", "completion": "b", "label": true}'), is_labeled_record(b'{"label": true}')
    (True, False)
    """
    return _LABEL.search(begin) is not None and _COMPLETION.search(begin) is not None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LabeledAnswer(Document):
    """An answer with its label, and the answer to another prompt after the same prompt; as a document, its text is that of both.

    Attributes:
        answer: The answer after its prompt: a text, or a conversation.
        mismatched: Another record's answer after this prompt.
        desirable: True if the answer is good.
    """

    answer: Document
    mismatched: Document
    desirable: bool


class AnswerRecord(NamedTuple):
    """A checked record.

    Attributes:
        prompt: A text, or a list of messages.
        completion: A text, or a list of messages.
        has_messages: True if the prompt is a list of messages.
    """

    where: str
    prompt: Any
    completion: Any
    label: bool
    has_messages: bool
    tools: Any = None
    options: Any = None


def check_record(record: Any, where: str) -> AnswerRecord:
    """Check the fields of a record.

    Raises:
        BadRecordError: The record is not a labeled answer.

    >>> check_record({"prompt": "2 + 2 =", "completion": " 4", "label": True}, "line 1").label
    True
    """
    if not isinstance(record, Mapping):
        raise BadRecordError(where, f"the record is {type(record).__name__}; {_EXPECTED}")
    if record.get("completion") is None and record.get("chosen") is not None and record.get("rejected") is not None:
        raise BadRecordError(
            where,
            "it has chosen and rejected, which are those of a preference pair: read it with data.Preferences, for "
            "models.Preference",
        )
    missing = [name for name in ("prompt", "completion", "label") if record.get(name) is None]
    if missing:
        raise BadRecordError(where, f"{describe_fields(record, missing)}; {_EXPECTED}")
    label = record["label"]
    if not (isinstance(label, bool) or (isinstance(label, int) and label in (0, 1))):
        raise BadRecordError(where, f"label is {label!r}; {_EXPECTED}")
    kinds = [describe_kind(record[name], name, where, _EXPECTED) for name in ("prompt", "completion")]
    if kinds == ["text", "messages"]:
        raise BadRecordError(
            where, "prompt is text, completion is messages; expected both as texts, or as lists of messages"
        )
    return AnswerRecord(
        where, record["prompt"], record["completion"], bool(label), kinds[0] == "messages", record.get("tools"),
        record.get(OPTIONS),
    )  # fmt: skip


def exchange_answers(
    records: Iterable[AnswerRecord | BadRecord], group_size: int
) -> Iterator[LabeledAnswer | BadRecord]:
    """Yield each record with another one's answer: among adjacent records, that of the one before it, and for the first one
    that of the last one, as TRL does for each batch.

    Args:
        group_size: Number of adjacent records; at least 2. A last group of one record joins the one before it.
    """
    group: list[AnswerRecord] = []
    for record in records:
        if isinstance(record, BadRecord):
            yield record
            continue
        group.append(record)
        if len(group) == group_size + 2:
            yield from _exchange(group[:group_size])
            group = group[group_size:]
    yield from _exchange(group)


def _exchange(group: list[AnswerRecord]) -> Iterator[LabeledAnswer | BadRecord]:
    for record, other in zip(group, [*group[-1:], *group[:-1]], strict=True):
        if len(group) == 1:
            yield BadRecord(
                record.where, "it is the only answer, and KTO compares each with the answer to another prompt; add some"
            )
            continue
        try:
            answer, mismatched = _document(record, record.completion), _document(record, other.completion)
        except BadRecordError as error:
            yield BadRecord(error.where, error.reason)
            continue
        yield LabeledAnswer(
            text=f"{answer.text}\n{mismatched.text}", prompt=answer.prompt, where=record.where, answer=answer,
            mismatched=mismatched, desirable=record.label,
        )  # fmt: skip


def _document(record: AnswerRecord, completion: Any) -> Document:
    """Return an answer after the record's prompt."""
    if not record.has_messages:
        if isinstance(completion, str):
            return Document(text=completion, prompt=record.prompt, where=record.where)
        raise BadRecordError(
            record.where,
            "its prompt is text, and the answer before it is messages; give all records as texts, or as messages",
        )
    answer = [{"role": ANSWER, "content": completion}] if isinstance(completion, str) else list(completion)
    return make_conversation(
        [*record.prompt, *answer], where=record.where, tools=record.tools, options=record.options,
        first_trained=len(record.prompt),
    )  # fmt: skip
