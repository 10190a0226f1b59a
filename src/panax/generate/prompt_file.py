"""Answers to a file of prompts, as JSON lines in the order of the prompts; an interrupted call is continued."""

import dataclasses
import hashlib
import io
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from ..core.errors import DataError, PanaxError, RecipeError
from ..data.files.bounds import MAX_RECORD_BYTES
from ..data.formats.json_records import read_lines, read_records
from ..data.formats.records import Parquet
from ..data.text.corpus import BadRecord
from ..data.text.tokenizer import Tokenizer
from ..system import json_reader
from ..system.files import trim_partial_line
from ..system.lock import open_locked
from .engine import GenerationEngine
from .prompts import encode_conversation, encode_prompt
from .requests import Completion, GenerationRequest
from .sampling import Sampling

PARQUET_SUFFIX = ".parquet"
_FORM = 'expected {"prompt": "text"} or {"messages": [{"role": "user", "content": "text"}, ...]}'


class FileSummary(NamedTuple):
    """Numbers of a file's prompts.

    Attributes:
        kept: Number of prompts that an earlier call has answered.
        refused: Number of prompts without an answer; their lines have `error`.
    """

    prompts: int
    kept: int
    refused: int


class AnsweringModel(NamedTuple):
    """A model that answers a file.

    Attributes:
        tokenizer: The tokenizer of the engine.
        address: The model's address: the answers of another one are not continued.
    """

    engine: GenerationEngine
    tokenizer: Tokenizer
    address: str


def answer_file(
    answering: AnsweringModel,
    prompts: Path,
    output: Path,
    sampling: Sampling,
    *,
    chat: bool = False,
    report: Callable[[str], None] = lambda line: None,
) -> FileSummary:
    """Answer the prompts of a file, and append a line for each to `output` as soon as those before it are written.

    A line has `index`, `prompt` or `messages`, and `answers`, each with `text`, `finish` and its number of `tokens`;
    a prompt that can't be answered has `error` instead. Lines that are there from an earlier call are kept.

    Args:
        prompts: JSON lines (also compressed, or one array) with `prompt` or `messages`; or Parquet with the column
            `prompt`.
        chat: Answer each `prompt` as a user's message.
        report: Called with a line about earlier answers.

    Raises:
        DataError: The prompts can't be read; or the answers in `output` can't, or are of other prompts.
        RecipeError: The answers in `output` are of another model or settings; or another process is writing them; or the
            constraint can't be used.
    """
    answering.engine.check_constraint(sampling.constraint)
    origin = _digest({"model": answering.address, "chat": chat, **dataclasses.asdict(sampling)})
    try:
        file = open_locked(output)
    except BlockingIOError as error:
        raise RecipeError(f"another process is writing {output}; wait for it, or choose another output") from error
    with file:
        written = _count_answers(output, origin, read_prompts(prompts))
        trim_partial_line(file)
        if written:
            report(f"{output} has the first {written} answers; the others are appended")
        lines = _answered(answering, prompts, sampling, chat=chat, skipped=written)
        refused, total = 0, written
        for line in lines:
            refused += "error" in line
            total += 1
            file.write(json.dumps(line | {"origin": origin}, ensure_ascii=False).encode() + b"\n")
    return FileSummary(total, written, refused)


def read_prompts(path: Path) -> Iterator[dict[str, Any] | BadRecord]:
    """Yield the records of a file of prompts: objects with `prompt` or `messages`.

    Raises:
        DataError: The file can't be read.
    """
    if path.suffix == PARQUET_SUFFIX:
        for document in Parquet(paths=(str(path),), text="prompt").documents():
            yield document if isinstance(document, BadRecord) else {"prompt": document.text}
        return
    for where, record in read_records(path, str(path), MAX_RECORD_BYTES):
        if isinstance(record, BadRecord) or isinstance(record.get("prompt"), str) != isinstance(
            record.get("messages"), list
        ):
            yield record
        else:
            yield BadRecord(where, f"no prompt; {_FORM}")


def _answered(
    answering: AnsweringModel, prompts: Path, sampling: Sampling, *, chat: bool, skipped: int
) -> Iterator[dict[str, Any]]:
    """Yield the lines of the prompts after the first `skipped` ones, in order."""
    engine, tokenizer, _ = answering
    waiting: dict[int, dict[str, Any]] = {}
    numbers: list[int] = []

    def requests() -> Iterator[GenerationRequest]:
        for index, record in enumerate(read_prompts(prompts)):
            if index < skipped:
                continue
            line = waiting[index] = {"index": index, **_shown(record)}
            try:
                request = _request(tokenizer, record, sampling, chat=chat)
                engine.check(request)
            except PanaxError as error:
                line["error"] = str(error)
                continue
            numbers.append(index)
            yield request

    answers: dict[int, list[Completion]] = {}
    following = skipped
    for event in engine.stream(requests()):
        if event.completion is not None:
            index = numbers[event.number]
            answers.setdefault(index, []).append(event.completion)
            if len(answers[index]) == sampling.n:
                done = sorted(answers.pop(index), key=lambda each: each.sample)
                if error := next((each.error for each in done if each.finish == "error"), None):
                    waiting[index]["error"] = error
                else:
                    waiting[index]["answers"] = [_answer(each, sampling) for each in done]
        while following in waiting and waiting[following].keys() & {"answers", "error"}:
            yield waiting.pop(following)
            following += 1
    while following in waiting:
        yield waiting.pop(following)
        following += 1


def _request(
    tokenizer: Tokenizer, record: dict[str, Any] | BadRecord, sampling: Sampling, *, chat: bool
) -> GenerationRequest:
    if isinstance(record, BadRecord):
        raise DataError(f"{record.where}: {record.reason}")
    if "messages" in record:
        return GenerationRequest(tuple(encode_conversation(tokenizer, record["messages"])), sampling)
    return GenerationRequest(tuple(encode_prompt(tokenizer, record["prompt"], chat=chat)), sampling)


def _shown(record: dict[str, Any] | BadRecord) -> dict[str, Any]:
    if isinstance(record, BadRecord):
        return {}
    return {name: record[name] for name in ("prompt", "messages") if name in record}


def _answer(completion: Completion, sampling: Sampling) -> dict[str, Any]:
    answer: dict[str, Any] = {
        "text": completion.text,
        "finish": completion.finish,
        "tokens": len(completion.tokens),
    }
    if sampling.top_log_probabilities:
        answer["log_probabilities"] = [
            {"token": each.token, "log_probability": each.log_probability, "top": each.top}
            for each in completion.tokens
        ]
    return answer


def _count_answers(output: Path, origin: str, prompts: Iterator[dict[str, Any] | BadRecord]) -> int:
    """Return the number of whole lines in `output`, which must be the first ones of these prompts.

    A line without an end must be the beginning of the next one: nothing else is ever removed.
    """
    count = 0
    advice = f"choose another output, or remove {output}"
    content = output.read_bytes()
    complete, end, partial = content.rpartition(b"\n")
    with io.BytesIO(complete + end) as file:
        for where, line in read_lines(file, str(output), json_reader.MAX_BYTES):
            if isinstance(line, BadRecord):
                raise DataError(f"{where}: {line.reason}; {advice}")
            try:
                written = json_reader.parse_as(dict, line)
            except json_reader.JsonError as error:
                raise DataError(f"{where}: {error}; it is not a line of answers: {advice}") from error
            if written.get("origin") != origin:
                raise RecipeError(f"{where} was written by another model or with other settings; {advice}")
            record = next(prompts, None)
            if (
                record is None
                or written.get("index") != count
                or any(written.get(name) != value for name, value in _shown(record).items())
            ):
                raise DataError(f"{where} answers another prompt than that of index {count}; {advice}")
            count += 1
    begin = json.dumps({"index": count}).encode().removesuffix(b"}")
    if not (partial.startswith(begin) or begin.startswith(partial)):
        raise DataError(f"{output} ends with a line that is not the beginning of an answer; {advice}")
    return count


def _digest(values: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()[:16]
