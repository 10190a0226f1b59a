"""Config of a mixture: named corpora, their weights over the steps, and their maximum numbers of passes."""

import dataclasses
import itertools
import math
import re

from panax.core.errors import RecipeError
from panax.core.validation import Validated

from ..text.filtered_corpus import FilteredCorpus, PlainCorpus

Weight = float | tuple[tuple[int, float], ...]
_NAME = re.compile(r"[A-Za-z0-9_.-]+")


@dataclasses.dataclass(frozen=True, kw_only=True)
class MixtureComponent(Validated):
    """One corpus of a mixture.

    Attributes:
        name: Name of the part in positions, metrics and errors.
        corpus: The documents.
        weight: The part's share of the rows, relative to the other parts' weights: one number, or pairs of a
            step and a weight, interpolated linearly and constant before the first pair and after the last.
        epochs: Number of passes after which the part is exhausted; the other parts then take over its share.
            None: endless.
    """

    name: str
    corpus: PlainCorpus | FilteredCorpus
    weight: Weight = 1.0
    epochs: float | None = None

    def __post_init__(self) -> None:
        if not _NAME.fullmatch(self.name):
            raise RecipeError(f"name={self.name!r} of a part; expected letters, digits, '_', '.' or '-'")
        if self.epochs is not None and not 0 < self.epochs < math.inf:
            raise RecipeError(f"epochs={self.epochs} of part {self.name!r}; expected more than 0, or None for no end")
        pairs = self.weight if isinstance(self.weight, tuple) else ((0, self.weight),)
        steps = [step for step, _ in pairs]
        if not pairs or steps != sorted(set(steps)) or steps[0] < 0:
            raise RecipeError(f"weight={self.weight} of part {self.name!r}; expected (step, weight) with rising steps")
        if not all(0 <= weight < math.inf for _, weight in pairs):
            raise RecipeError(f"weight={self.weight} of part {self.name!r}; expected 0 or more")

    def weight_at(self, step: int) -> float:
        """Return the weight at step `step`, counted from 0.

        >>> from panax.data import PythonLibrary
        >>> part = MixtureComponent(name="library", corpus=PythonLibrary(), weight=((0, 0.0), (100, 1.0)))
        >>> part.weight_at(25), part.weight_at(1000)
        (0.25, 1.0)
        """
        if not isinstance(self.weight, tuple):
            return float(self.weight)
        # Not NumPy's interpolation: every machine must compute the same bits.
        for (before, low), (after, high) in itertools.pairwise(self.weight):
            if step < after:
                return low + (high - low) * max(step - before, 0) / (after - before)
        return float(self.weight[-1][1])


@dataclasses.dataclass(frozen=True, kw_only=True)
class Mixture(Validated):
    """A mixture of several corpora, each shuffled, packed and repeated independently.

    Attributes:
        parts: The components.
    """

    parts: tuple[MixtureComponent, ...]

    def __post_init__(self) -> None:
        names = [part.name for part in self.parts]
        if not names or len(set(names)) < len(names):
            raise RecipeError(f"a mixture of the parts {names}; expected one or more, each with a unique name")
        steps = {0, *(step for part in self.parts if isinstance(part.weight, tuple) for step, _ in part.weight)}
        for step in sorted(steps):
            if not any(part.weight_at(step) for part in self.parts):
                raise RecipeError(f"every part of the mixture has weight 0 at step {step}; raise one of them")
