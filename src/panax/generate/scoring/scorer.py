"""Scores of a model on a file of questions, and its answers."""

import contextlib
import dataclasses
import math
from collections.abc import Callable, Generator, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from ...core.errors import PanaxError, RecipeError
from ...data.text.tokenizer import Tokenizer
from ..engine import GenerationEngine
from ..prompts import encode_conversation, encode_prompt
from ..requests import Completion, FinishReason, GenerationRequest, StreamEvent
from ..sampling import Sampling
from .answer_format import WHOLE_TEXT, AnswerFormat
from .questions import Question, QuestionKind, encode_choice, encode_windows, read_questions
from .results import AnswerResult, QuestionResult, TaskResult


def score_file(
    engine: GenerationEngine,
    tokenizer: Tokenizer,
    path: Path,
    sampling: Sampling,
    *,
    chat: bool = False,
    answers: AnswerFormat = WHOLE_TEXT,
) -> TaskResult:
    """Ask a model the questions of a file.

    Args:
        tokenizer: The engine's.
        sampling: For questions with an answer to compare: how it is generated; with `n` above 1, pass@k too.
        chat: Ask each prompt as a user's message.

    Raises:
        DataError: The file can't be read, or a record is broken.
        RecipeError: No question can be asked.
    """
    questions = list(read_questions(path))
    result = score_questions(engine, tokenizer, questions, sampling, chat=chat, answers=answers)
    if result.refused == len(questions):
        raise RecipeError(f"no question of {path} can be asked; the first: {result.samples[0].error}")
    return result


def score_questions(
    engine: GenerationEngine,
    tokenizer: Tokenizer,
    questions: Sequence[Question],
    sampling: Sampling,
    *,
    chat: bool = False,
    answers: AnswerFormat = WHOLE_TEXT,
    on_progress: Callable[[], None] = lambda: None,
) -> TaskResult:
    """Ask a model questions of one kind; arguments are those of `score_file`.

    Args:
        questions: At least one.
        on_progress: Called for each token and each score; if it raises, the questions are abandoned.
    """
    parts: list[_Part] = []
    outcomes: list[list[list[_Outcome]]] = [[] for _ in questions]
    errors = [""] * len(questions)

    def requests() -> Iterator[GenerationRequest]:
        for index, question in enumerate(questions):
            try:
                made = make_requests(engine, tokenizer, question, sampling, chat=chat)
            except PanaxError as error:
                errors[index] = str(error)
                continue
            outcomes[index] = [[] for _ in made]
            for place, (before, request) in enumerate(made):
                parts.append(_Part(index, place, before, len(request.prompt) - before))
                yield request

    def events() -> Generator[StreamEvent]:
        yield from engine.stream(requests())

    with contextlib.closing(events()) as stream:
        for event in stream:
            on_progress()
            if (completion := event.completion) is not None:
                part = parts[completion.number]
                outcomes[part.question][part.place].append(_Outcome.of(completion, part))
    return TaskResult.of(
        [
            QuestionResult(question, error) if error else _result(question, each, answers)
            for question, error, each in zip(questions, errors, outcomes, strict=True)
        ]
    )


def make_requests(
    engine: GenerationEngine, tokenizer: Tokenizer, question: Question, sampling: Sampling, *, chat: bool = False
) -> list[tuple[int, GenerationRequest]]:
    """Return the requests of a question: one for each choice or window, or one for its answers; each with the number of
    tokens before those that are scored.

    Raises:
        DataError, RecipeError: The engine can't answer them; see `GenerationEngine.check`.
    """
    prompt = question.prompt
    if chat and prompt and isinstance(prompt, str):
        prompt = [{"role": "user", "content": prompt}]
        question = dataclasses.replace(question, prompt=prompt)
    if question.kind is QuestionKind.ANSWER:
        ids = encode_prompt(tokenizer, prompt) if isinstance(prompt, str) else encode_conversation(tokenizer, prompt)
        made = [(len(ids), GenerationRequest(tuple(ids), sampling))]
    else:
        pairs = (
            encode_windows(tokenizer, question.choices[0], engine.limit - 2)
            if question.kind is QuestionKind.TEXT
            else [encode_choice(tokenizer, question, choice) for choice in question.choices]
        )
        made = [(len(before), GenerationRequest.to_score((*before, *after), len(after))) for before, after in pairs]
    for _, request in made:
        engine.check(request)
    return made


class _Part(NamedTuple):
    """A request of a question.

    Attributes:
        question: Index of the question.
        place: Index among the question's requests.
        before: Number of tokens before those that are scored.
        tokens: Number of tokens that are scored.
    """

    question: int
    place: int
    before: int
    tokens: int


class _Outcome(NamedTuple):
    """The values of a completion of which results are made: those of a long text have a record for each token."""

    sample: int
    log_probability: float
    tokens: int
    text: str
    finish: FinishReason

    @classmethod
    def of(cls, completion: Completion, part: _Part) -> "_Outcome":
        scored = math.fsum(completion.prompt_log_probabilities)
        return cls(completion.sample, scored, part.tokens, completion.text, completion.finish)


def _result(question: Question, outcomes: Sequence[Sequence[_Outcome]], answers: AnswerFormat) -> QuestionResult:
    """Return the result of a question.

    Args:
        outcomes: For each of its requests, those of all samples in any order.
    """
    if question.kind is QuestionKind.ANSWER:
        accepted = {each.strip() for each in question.accepted}
        extracted = [(each, answers.extract(each.text)) for each in sorted(outcomes[0])]
        results = [AnswerResult(each.text, answer, answer in accepted, each.finish) for each, answer in extracted]
        return QuestionResult(question, answers=tuple(results))
    scored = [each for [each] in outcomes]
    return QuestionResult(
        question,
        log_probabilities=tuple(each.log_probability for each in scored),
        tokens=tuple(each.tokens for each in scored),
    )
