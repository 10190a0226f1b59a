"""Scores of a model on a user's own questions: texts, multiple choice, and answers to compare."""

from .questions import QuestionKind
from .scorer import AnswerFormat, TaskResult, score_file
from .statistics import Estimate

__all__ = ["AnswerFormat", "Estimate", "QuestionKind", "TaskResult", "score_file"]
