"""Generation: a task's model continues rows of tokens, many at once, each with its own settings."""

from typing import TYPE_CHECKING

from ..core.lazy import lazy_getattr
from .batching import Batching
from .constraints import Constraint, Grammar, JsonSchema, Regex
from .engine import GenerationEngine
from .prompt_file import AnsweringModel, FileSummary, answer_file
from .prompts import encode_conversation, encode_prompt
from .requests import Completion, FinishReason, GeneratedToken, GenerationRequest, StreamEvent
from .sampling import Sampling

if TYPE_CHECKING:
    from .lm_eval_model import LmEvalModel as LmEvalModel

# It needs lm-eval, which is an extra.
__getattr__ = lazy_getattr(__name__, {"lm_eval_model": ("LmEvalModel",)})

__all__ = [
    "AnsweringModel", "Batching", "Completion", "Constraint", "FileSummary", "FinishReason", "GeneratedToken", "GenerationEngine",
    "GenerationRequest", "Grammar", "JsonSchema", "Regex", "Sampling", "StreamEvent", "answer_file", "encode_conversation",
    "encode_prompt",
]  # fmt: skip
