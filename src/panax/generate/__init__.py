"""Generation: a task's model continues rows of tokens, many at once, each with its own settings."""

from .engine import GenerationEngine
from .prompt_file import AnsweringModel, FileSummary, answer_file
from .prompts import encode_conversation, encode_prompt
from .requests import Completion, FinishReason, GeneratedToken, GenerationRequest, StreamEvent
from .sampling import Sampling

__all__ = [
    "AnsweringModel", "Completion", "FileSummary", "FinishReason", "GeneratedToken", "GenerationEngine", "GenerationRequest",
    "Sampling", "StreamEvent", "answer_file", "encode_conversation", "encode_prompt",
]  # fmt: skip
