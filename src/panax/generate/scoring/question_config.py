"""`QuestionConfig`: files of questions that a run asks its model."""

import dataclasses
from collections import Counter
from pathlib import Path

from ...core.errors import RecipeError
from ...core.validation import Validated
from ...data.files.decompression import SUFFIXES
from ...system.files import expand_user
from ..sampling import Sampling
from .answer_format import AnswerFormat
from .questions import Question, read_questions


@dataclasses.dataclass(frozen=True, kw_only=True)
class QuestionConfig(Validated):
    """Questions to ask the model while it trains, and at the end.

    Attributes:
        files: Files of JSON lines: texts, multiple choices, or questions with answers. Scores are named after them:
            `questions/choices/acc` for `choices.jsonl`.
        every: Steps between two scorings; 0 asks at the end only.
        limit: Ask the first of each file, at most this many; 0 for all.
        chat: Ask each prompt as a user's message.
        pattern: The answer is the last match of this regular expression in the generated text; empty: all of it.
        tokens: Maximum number of tokens of a generated answer.
        temperature: Sampling temperature of generated answers; 0 takes the likeliest token.
        n: Number of answers to each question, for pass@k.
        seed: Seed of generated answers.
        rows: Number of questions that are asked at the same time.
        length: Maximum positions of question and answer together; 0: those of the model, at most 2048.
    """

    files: tuple[str, ...] = ()
    every: int = 0
    limit: int = 0
    chat: bool = False
    pattern: str = ""
    tokens: int = 128
    temperature: float = 0.0
    n: int = 1
    seed: int = 0
    rows: int = 8
    length: int = 0

    def __post_init__(self) -> None:
        for name, minimum in (("every", 0), ("limit", 0), ("length", 0), ("rows", 1)):
            if getattr(self, name) < minimum:
                raise RecipeError(f"questions.{name}={getattr(self, name)}; expected {minimum} or more")
        if self.every and not self.files:
            raise RecipeError(
                f"questions.every={self.every} has no effect without questions.files; pass files, or remove it"
            )
        [(name, count)] = Counter(map(_name_of, self.files)).most_common(1) or [("", 0)]
        if count > 1:
            raise RecipeError(
                f"questions.files has {count} files of the name {name}, after which their scores are named; rename one"
            )
        # Each checks its settings.
        _ = self.sampling, self.answers

    @property
    def sampling(self) -> Sampling:
        """Return the settings of generated answers."""
        return Sampling(tokens=self.tokens, temperature=self.temperature, n=self.n, seed=self.seed)

    @property
    def answers(self) -> AnswerFormat:
        """Return how generated answers are compared."""
        return AnswerFormat(self.pattern or None)

    def read(self) -> dict[str, list[Question]]:
        """Read all questions, by the name of their file.

        Raises:
            DataError: A file can't be read, or a record is broken.
        """
        files = {_name_of(file): list(read_questions(expand_user(file))) for file in self.files}
        return {name: questions[: self.limit or None] for name, questions in files.items()}


def _name_of(file: str) -> str:
    """Return the name of a file without its endings.

    >>> _name_of("a/choices.jsonl"), _name_of("choices.jsonl.gz"), _name_of("v1.5/sums-v1.5.jsonl")
    ('choices', 'choices', 'sums-v1.5')
    """
    path = Path(file)
    return Path(path.stem).stem if path.suffix.lower() in SUFFIXES else path.stem
