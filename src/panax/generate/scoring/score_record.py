"""Record of a file's scores with its first questions, of bounded size, as a report shows it."""

import math
from typing import Any

from .questions import QuestionKind
from .results import QuestionResult, TaskResult

MAX_QUESTIONS = 200
"""Maximum number of questions of a file in a record."""

MAX_CHARACTERS = 600
"""Maximum length of each text in a record."""


def to_record(name: str, result: TaskResult) -> dict[str, Any]:
    """Return the record of a file's result, as JSON values.

    Args:
        name: Name of the file.
    """
    return {
        "name": name,
        "kind": result.kind.name.lower(),
        "count": len(result.samples),
        "refused": result.refused,
        "cut": result.cut,
        "scores": [
            {"name": score, **{key: _finite(value) for key, value in estimate._asdict().items()}}
            for score, estimate in result.scores.items()
        ],
        "questions": [_question_record(sample) for sample in result.samples[:MAX_QUESTIONS]],
    }


def _question_record(sample: QuestionResult) -> dict[str, Any]:
    """Return a question with the model's answer, the expected one and the score, as texts."""
    question = sample.question
    prompt = question.prompt if isinstance(question.prompt, str) else _conversation(question.prompt)
    record = {"where": question.where, "question": _cut(prompt), "answer": "", "expected": "", "score": ""}
    if sample.error:
        return record | {"error": _cut(sample.error)}
    match question.kind:
        case QuestionKind.TEXT:
            bits = -math.fsum(sample.log_probabilities) / math.log(2.0) / len(question.choices[0].encode())
            return record | {"question": _cut(question.choices[0]), "score": f"{bits:.4g} bits per byte"}
        case QuestionKind.CHOICE:
            return record | {
                "answer": _cut(question.choices[sample.chosen]),
                "expected": _cut(question.choices[question.right]),
                "score": "right" if sample.acc else "wrong",
            }
        case QuestionKind.ANSWER:
            right = sum(answer.right for answer in sample.answers)
            n = len(sample.answers)
            score = f"{right} of {n} right" if n > 1 else "right" if right else "wrong"
            return record | {
                "answer": _cut(sample.answers[0].text),
                "expected": _cut(" | ".join(question.accepted)),
                "score": score,
            }


def _conversation(messages: list[dict[str, Any]]) -> str:
    return "\n".join(f"{message.get('role', '')}: {message.get('content', '')}" for message in messages)


def _cut(text: str) -> str:
    """Cut a text to the maximum length.

    >>> _cut("a" * 700)[-30:]
    'aaaaaa ... 100 characters more'
    """
    more = len(text) - MAX_CHARACTERS
    return text if more <= 0 else f"{text[:MAX_CHARACTERS]} ... {more:,} characters more"


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
