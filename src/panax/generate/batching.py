"""`Batching`: how much an engine does in one program, for answers that somebody reads as they come, or for many at once."""

import dataclasses

from ..core.errors import RecipeError
from ..core.validation import Validated


@dataclasses.dataclass(frozen=True, kw_only=True)
class Batching(Validated):
    """Amounts of work of each round of an engine. Larger ones end a batch of many requests earlier, and delay single tokens.

    Attributes:
        prompts: Number of prompts of which a chunk is run in each round, of each group.
        samples: Number of answers to one request that share the computation of its prompt.
        steps: Number of tokens that each answer is continued by in a round; those after its end are dropped.
        pieces: False if nobody reads the texts of single tokens in events, but those of completions alone.
    """

    prompts: int = 1
    samples: int = 1
    steps: int = 1
    pieces: bool = True

    def __post_init__(self) -> None:
        for name in ("prompts", "samples", "steps"):
            if getattr(self, name) < 1:
                raise RecipeError(f"{name}={getattr(self, name)}; expected 1 or more")
