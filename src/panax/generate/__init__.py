"""Generation: a task's model continues rows of tokens, many at once, each with its own settings."""

from .constraints import Constraint, Grammar, JsonSchema, Regex
from .engine import GenerationEngine
from .prompt_file import AnsweringModel, FileSummary, answer_file
from .prompts import encode_conversation, encode_prompt
from .requests import Completion, FinishReason, GeneratedToken, GenerationRequest, StreamEvent
from .sampling import Sampling

__all__ = [
    "AnsweringModel", "Completion", "Constraint", "FileSummary", "FinishReason", "GeneratedToken", "GenerationEngine",
    "GenerationRequest", "Grammar", "JsonSchema", "Regex", "Sampling", "StreamEvent", "answer_file", "encode_conversation",
    "encode_prompt",
]  # fmt: skip
