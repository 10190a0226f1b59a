"""Scores of a model on a file of questions, and its answers."""

import dataclasses
import math
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from ...core.errors import PanaxError, RecipeError
from ...data.text.tokenizer import Tokenizer
from ..engine import GenerationEngine
from ..prompts import encode_conversation, encode_prompt
from ..requests import Completion, GenerationRequest
from ..sampling import Sampling
from .questions import Question, QuestionKind, encode_choice, encode_windows, read_questions
from .statistics import Estimate, estimate_ratio, pass_at_k

PASS_AT = (1, 2, 4, 8, 16, 32, 64, 128)
SHARE = (0.0, 1.0)


class TaskResult(NamedTuple):
    """Result of a file of questions.

    Attributes:
        scores: By name: `bits_per_byte` and `token_perplexity` of texts; `acc` and `acc_norm` (by bytes of the choice)
            of choices; `exact_match` and `pass@k` of answers.
        samples: One record for each question, as JSON values.
        refused: Number of questions that could not be asked, such as those that are too long: no score counts them.
        cut: Number of answers that ended by their maximum number of tokens.
    """

    kind: QuestionKind
    scores: Mapping[str, Estimate]
    samples: list[dict[str, Any]]
    refused: int
    cut: int


@dataclasses.dataclass(frozen=True)
class AnswerFormat:
    """How a generated answer is compared.

    Attributes:
        pattern: A regular expression: the answer is its last match (the first group, if it has groups). None: the whole
            text. Spaces around it are removed.
    """

    pattern: str | None = None

    def __post_init__(self) -> None:
        try:
            re.compile(self.pattern or "")
        except re.error as error:
            raise RecipeError(f"the pattern {self.pattern!r} is not a regular expression: {error}") from error

    def extract(self, text: str) -> str:
        """Return the answer in a text, "" if the pattern does not match."""
        if self.pattern is None:
            return text.strip()
        matches = list(re.finditer(self.pattern, text))
        if not matches:
            return ""
        return (matches[-1].group(1 if matches[-1].re.groups else 0) or "").strip()


def score_file(
    engine: GenerationEngine,
    tokenizer: Tokenizer,
    path: Path,
    sampling: Sampling,
    *,
    chat: bool = False,
    answers: AnswerFormat = AnswerFormat(),
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
    kind = questions[0].kind
    if chat:
        questions = [_as_message(question) for question in questions]
    ask = _ask_answers if kind is QuestionKind.ANSWER else _ask_scores
    samples: list[dict[str, Any]] = [{"where": question.where} for question in questions]
    ask(engine, tokenizer, questions, samples, sampling, answers)
    good = [sample for sample in samples if "error" not in sample]
    if not good:
        raise RecipeError(f"no question of {path} can be asked; the first: {samples[0]['error']}")
    cut = sum(each["finish"] == "length" for sample in good for each in sample.get("answers", ()))
    return TaskResult(kind, _SUMMARIES[kind](good), samples, len(samples) - len(good), cut)


def _as_message(question: Question) -> Question:
    if not question.prompt or not isinstance(question.prompt, str):
        return question
    return dataclasses.replace(question, prompt=[{"role": "user", "content": question.prompt}])


def _ask_scores(
    engine: GenerationEngine,
    tokenizer: Tokenizer,
    questions: list[Question],
    samples: list[dict[str, Any]],
    sampling: Sampling,
    answers: AnswerFormat,
) -> None:
    """Score the choices of each question, or the windows of each text."""
    # The engine draws a token after each prompt, which takes one position.
    asked = Sampling(tokens=1, temperature=0.0, prompt_log_probabilities=True)
    # Of each request: index of the question, of its part, and the number of tokens before those that are scored.
    parts: list[tuple[int, int, int]] = []

    def requests() -> Iterator[GenerationRequest]:
        for index, question in enumerate(questions):
            try:
                made = [
                    (before, GenerationRequest((*before, *after), asked))
                    for before, after in _scored_parts(tokenizer, question, engine.limit - 2)
                ]
                for _, request in made:
                    engine.check(request)
            except PanaxError as error:
                samples[index]["error"] = str(error)
                continue
            samples[index]["log_probabilities"] = [0.0] * len(made)
            samples[index]["tokens"] = [len(request.prompt) - len(before) for before, request in made]
            for place, (before, request) in enumerate(made):
                parts.append((index, place, len(before)))
                yield request

    for completion in _completions(engine, requests()):
        index, place, before = parts[completion.number]
        scored = completion.prompt_log_probabilities[before - 1 :]
        samples[index]["log_probabilities"][place] = math.fsum(scored)
    for question, sample in zip(questions, samples, strict=True):
        if "error" not in sample:
            sample |= {"choices": list(question.choices), "right": question.right}


def _scored_parts(tokenizer: Tokenizer, question: Question, size: int) -> list[tuple[list[int], list[int]]]:
    if question.kind is QuestionKind.TEXT:
        return encode_windows(tokenizer, question.choices[0], size)
    return [encode_choice(tokenizer, question, choice) for choice in question.choices]


def _ask_answers(
    engine: GenerationEngine,
    tokenizer: Tokenizer,
    questions: list[Question],
    samples: list[dict[str, Any]],
    sampling: Sampling,
    answers: AnswerFormat,
) -> None:
    """Generate answers to each question, and compare them."""
    indices: list[int] = []

    def requests() -> Iterator[GenerationRequest]:
        for index, question in enumerate(questions):
            try:
                prompt = question.prompt
                encoded = (
                    encode_prompt(tokenizer, prompt)
                    if isinstance(prompt, str)
                    else encode_conversation(tokenizer, prompt)
                )
                request = GenerationRequest(tuple(encoded), sampling)
                engine.check(request)
            except PanaxError as error:
                samples[index]["error"] = str(error)
                continue
            samples[index] |= {"accepted": list(question.accepted), "answers": [None] * sampling.n}
            indices.append(index)
            yield request

    for completion in _completions(engine, requests()):
        index = indices[completion.number]
        answer = answers.extract(completion.text)
        is_right = answer in {each.strip() for each in questions[index].accepted}
        samples[index]["answers"][completion.sample] = {
            "text": completion.text,
            "answer": answer,
            "right": is_right,
            "finish": completion.finish,
        }


def _completions(engine: GenerationEngine, requests: Iterable[GenerationRequest]) -> Iterator[Completion]:
    return (event.completion for event in engine.stream(requests) if event.completion is not None)


def _summarize_texts(samples: list[dict[str, Any]]) -> dict[str, Estimate]:
    losses = [-math.fsum(sample["log_probabilities"]) for sample in samples]
    tokens = [float(sum(sample["tokens"])) for sample in samples]
    sizes = [float(len(sample["choices"][0].encode())) for sample in samples]
    loss = estimate_ratio(losses, tokens)
    return {
        "bits_per_byte": estimate_ratio([each / math.log(2.0) for each in losses], sizes),
        "token_perplexity": loss._replace(value=math.exp(loss.value), low=math.exp(loss.low), high=math.exp(loss.high)),
    }


def _summarize_choices(samples: list[dict[str, Any]]) -> dict[str, Estimate]:
    right: dict[str, list[float]] = {"acc": [], "acc_norm": []}
    for sample in samples:
        scores = sample["log_probabilities"]
        sizes = [len(choice.encode()) for choice in sample["choices"]]
        by_byte = [score / size for score, size in zip(scores, sizes, strict=True)]
        for name, values in (("acc", scores), ("acc_norm", by_byte)):
            chosen = max(range(len(values)), key=values.__getitem__)
            sample[name] = chosen == sample["right"]
            right[name].append(float(sample[name]))
    return {name: estimate_ratio(values, [1.0] * len(values), bounds=SHARE) for name, values in right.items()}


def _summarize_answers(samples: list[dict[str, Any]]) -> dict[str, Estimate]:
    counts = [sum(each["right"] for each in sample["answers"]) for sample in samples]
    n = len(samples[0]["answers"])
    ones = [1.0] * len(samples)
    scores = {"exact_match": estimate_ratio([count / n for count in counts], ones, bounds=SHARE)}
    for k in PASS_AT:
        if 1 < k <= n:
            values = [pass_at_k(n, count, k) for count in counts]
            scores[f"pass@{k}"] = estimate_ratio(values, ones, bounds=SHARE)
    return scores


_SUMMARIES = {
    QuestionKind.TEXT: _summarize_texts,
    QuestionKind.CHOICE: _summarize_choices,
    QuestionKind.ANSWER: _summarize_answers,
}
