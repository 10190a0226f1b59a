"""Questions of a file: texts to score, choices to rank, answers to compare."""

import dataclasses
import enum
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ...core.errors import DataError
from ...data.files.bounds import MAX_RECORD_BYTES
from ...data.formats.json_records import read_records
from ...data.text.corpus import BadRecord
from ...data.text.tokenizer import Tokenizer
from ..prompts import encode_conversation


class QuestionKind(enum.Enum):
    """Kinds of questions; the value is the form of a record."""

    TEXT = '{"text": "..."}'
    CHOICE = '{"prompt": "...", "choices": ["...", "..."], "answer": 0}'
    ANSWER = '{"prompt": "...", "answer": "..."}'


@dataclasses.dataclass(frozen=True)
class Question:
    """One record.

    Attributes:
        where: File and line.
        prompt: A text, or the messages of a conversation; empty for a text to score.
        choices: Of a multiple choice; the text itself, for a text to score.
        right: Index of the right choice.
        accepted: Answers that count as right.
    """

    kind: QuestionKind
    where: str
    prompt: str | list[dict[str, Any]]
    choices: tuple[str, ...] = ()
    right: int = 0
    accepted: tuple[str, ...] = ()


def read_questions(path: Path) -> Iterator[Question]:
    """Yield the questions of a file of JSON lines; all are of the first one's kind.

    Raises:
        DataError: The file can't be read, is empty, or a record is broken, of another kind or of none.
    """
    kind = None
    for where, record in read_records(path, str(path), MAX_RECORD_BYTES):
        if isinstance(record, BadRecord):
            raise DataError(f"{record.where}: {record.reason}")
        question = _question(where, record)
        kind = kind or question.kind
        if question.kind is not kind:
            raise DataError(
                f"{where} is of the form {question.kind.value}, the first question of {kind.value}; split the file"
            )
        yield question
    if kind is None:
        raise DataError(f"{path} has no questions; expected one of these forms on each line: {_forms()}")


def _question(where: str, record: dict[str, Any]) -> Question:
    if isinstance(text := record.get("text"), str) and text:
        return Question(QuestionKind.TEXT, where, "", (text,))
    prompt = record.get("prompt", record.get("messages"))
    answer, choices = record.get("answer"), record.get("choices")
    if not isinstance(prompt, str | list) or not prompt:
        raise DataError(f"{where} has neither text nor prompt; expected one of these forms: {_forms()}")
    if choices is None:
        accepted = (answer,) if isinstance(answer, str) else answer
        if (
            not isinstance(accepted, list | tuple)
            or not accepted
            or not all(isinstance(each, str) for each in accepted)
        ):
            raise DataError(f"{where}: answer={answer!r}; expected a text, or a list of accepted texts")
        return Question(QuestionKind.ANSWER, where, prompt, accepted=tuple(accepted))
    if not isinstance(choices, list) or len(choices) < 2 or not all(isinstance(each, str) and each for each in choices):
        raise DataError(f"{where}: choices={choices!r}; expected a list of two or more texts")
    if isinstance(answer, bool) or not isinstance(answer, int) or not 0 <= answer < len(choices):
        raise DataError(f"{where}: answer={answer!r}; expected the index of the right choice, 0 to {len(choices) - 1}")
    return Question(QuestionKind.CHOICE, where, prompt, tuple(choices), answer)


def _forms() -> str:
    return ", ".join(kind.value for kind in QuestionKind)


def encode_choice(tokenizer: Tokenizer, question: Question, choice: str) -> tuple[list[int], list[int]]:
    """Encode a prompt and a choice after it; a token that spans both belongs to the choice.

    Spaces at the end of a prompt belong to the choice too, as a text is usually cut into tokens. A prompt without
    tokens begins with the end of a document.
    """
    if not isinstance(question.prompt, str):
        rendered = encode_conversation(tokenizer, question.prompt)
        return rendered, tokenizer.encode(choice)
    prompt = question.prompt.rstrip(" ")
    [(before, after)] = tokenizer.encode_pairs([(prompt, question.prompt[len(prompt) :] + choice)])
    return [*tokenizer.start_of_document, *before] or [tokenizer.end_of_document], after


def encode_windows(tokenizer: Tokenizer, text: str, size: int) -> list[tuple[list[int], list[int]]]:
    """Cut a text into windows of at most `size` tokens, so that each token is scored once.

    Returns:
        For each window, the one token before it and its tokens. Before the first is the beginning of a document, or the end
        of one for a tokenizer without a token for the beginning.
    """
    ids = tokenizer.encode(text)
    before = (tokenizer.start_of_document or (tokenizer.end_of_document,))[-1]
    cuts = range(0, len(ids), size)
    return [([before if cut == 0 else ids[cut - 1]], ids[cut : cut + size]) for cut in cuts]
