"""`AnswerFormat`: the answer in a generated text."""

import dataclasses
import re

from ...core.errors import RecipeError


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


WHOLE_TEXT = AnswerFormat()
"""The answer is the whole text."""
