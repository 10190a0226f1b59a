"""Scores of a model on a user's own questions: texts, multiple choice, and answers to compare."""

from .answer_format import AnswerFormat
from .question_config import QuestionConfig
from .questions import Question, QuestionKind, read_questions
from .results import AnswerResult, QuestionResult, TaskResult
from .scorer import score_file, score_questions
from .statistics import Estimate

__all__ = [
    "AnswerFormat", "AnswerResult", "Estimate", "Question", "QuestionConfig", "QuestionKind", "QuestionResult", "TaskResult",
    "read_questions", "score_file", "score_questions",
]  # fmt: skip
