"""Results of questions: each one's log-probabilities or answers, and the scores of a file."""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from ..requests import FinishReason
from .questions import Question, QuestionKind
from .statistics import Estimate, estimate_ratio, pass_at_k

PASS_AT = (1, 2, 4, 8, 16, 32, 64, 128)
PROPORTION = (0.0, 1.0)


class AnswerResult(NamedTuple):
    """A generated answer, and its comparison with the accepted ones.

    Attributes:
        text: The generated text.
        answer: The answer in it.
        right: True if the answer is one of the accepted ones.
    """

    text: str
    answer: str
    right: bool
    finish: FinishReason


@dataclasses.dataclass(frozen=True)
class QuestionResult:
    """Result of one question.

    Attributes:
        error: Why the question could not be asked; empty if it was.
        log_probabilities: Of each choice, or of each window of a text.
        tokens: Number of tokens of each choice or window.
        answers: The generated answers to a question with accepted ones.
    """

    question: Question
    error: str = ""
    log_probabilities: tuple[float, ...] = ()
    tokens: tuple[int, ...] = ()
    answers: tuple[AnswerResult, ...] = ()

    @property
    def chosen(self) -> int:
        """Return the index of the choice with the highest log-probability."""
        return _argmax(self.log_probabilities)

    @property
    def acc(self) -> bool:
        """Return True if the right choice has the highest log-probability."""
        return self.chosen == self.question.right

    @property
    def acc_norm(self) -> bool:
        """Return True if the right choice has the highest log-probability per byte."""
        sizes = [len(choice.encode()) for choice in self.question.choices]
        per_byte = [score / size for score, size in zip(self.log_probabilities, sizes, strict=True)]
        return _argmax(per_byte) == self.question.right

    def to_json(self) -> dict[str, Any]:
        """Return the result as JSON values."""
        question = self.question
        record: dict[str, Any] = {"where": question.where}
        if question.prompt:
            record["prompt"] = question.prompt
        if self.error:
            return record | {"error": self.error}
        if question.kind is QuestionKind.ANSWER:
            answers = [answer._asdict() for answer in self.answers]
            return record | {"accepted": list(question.accepted), "answers": answers}
        record |= {
            "log_probabilities": list(self.log_probabilities),
            "tokens": list(self.tokens),
            "choices": list(question.choices),
        }
        if question.kind is QuestionKind.CHOICE:
            record |= {"right": question.right, "acc": self.acc, "acc_norm": self.acc_norm}
        return record


class TaskResult(NamedTuple):
    """Result of a file of questions.

    Attributes:
        scores: By name: `bits_per_byte` and `token_perplexity` of texts; `acc` and `acc_norm` (by bytes of the choice)
            of choices; `exact_match` and `pass@k` of answers.
        samples: One for each question, in the order of the file.
        refused: Number of questions that could not be asked, such as those that are too long: no score counts them.
        cut: Number of answers that ended by their maximum number of tokens.
    """

    kind: QuestionKind
    scores: Mapping[str, Estimate]
    samples: tuple[QuestionResult, ...]
    refused: int
    cut: int

    @classmethod
    def of(cls, samples: Sequence[QuestionResult]) -> "TaskResult":
        """Summarize the results of questions of one kind."""
        asked = [sample for sample in samples if not sample.error]
        cut = sum(answer.finish == "length" for sample in asked for answer in sample.answers)
        kind = samples[0].question.kind
        return cls(kind, _SUMMARIES[kind](asked), tuple(samples), len(samples) - len(asked), cut)


def _argmax(values: Sequence[float]) -> int:
    return max(range(len(values)), key=values.__getitem__)


def _summarize_texts(samples: Sequence[QuestionResult]) -> dict[str, Estimate]:
    losses = [-math.fsum(sample.log_probabilities) for sample in samples]
    tokens = [float(sum(sample.tokens)) for sample in samples]
    sizes = [float(len(sample.question.choices[0].encode())) for sample in samples]
    loss = estimate_ratio(losses, tokens)
    return {
        "bits_per_byte": estimate_ratio([each / math.log(2.0) for each in losses], sizes),
        "token_perplexity": loss._replace(value=_exp(loss.value), low=_exp(loss.low), high=_exp(loss.high)),
    }


def _exp(value: float) -> float:
    try:
        return math.exp(value)
    except OverflowError:
        return math.inf


def _summarize_choices(samples: Sequence[QuestionResult]) -> dict[str, Estimate]:
    ones = [1.0] * len(samples)
    right = {"acc": [sample.acc for sample in samples], "acc_norm": [sample.acc_norm for sample in samples]}
    return {name: estimate_ratio([*map(float, each)], ones, bounds=PROPORTION) for name, each in right.items()}


def _summarize_answers(samples: Sequence[QuestionResult]) -> dict[str, Estimate]:
    counts = [sum(answer.right for answer in sample.answers) for sample in samples]
    n = len(samples[0].answers) if samples else 1
    ones = [1.0] * len(samples)
    scores = {"exact_match": estimate_ratio([count / n for count in counts], ones, bounds=PROPORTION)}
    for k in PASS_AT:
        if 1 < k <= n:
            values = [pass_at_k(n, count, k) for count in counts]
            scores[f"pass@{k}"] = estimate_ratio(values, ones, bounds=PROPORTION)
    return scores


_SUMMARIES = {
    QuestionKind.TEXT: _summarize_texts,
    QuestionKind.CHOICE: _summarize_choices,
    QuestionKind.ANSWER: _summarize_answers,
}
