"""Synthetic click logs with a known best area under the ROC curve, far above any linear model's."""

import dataclasses
import math
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import numpy.typing as npt

from panax.core.errors import RecipeError
from panax.core.protocols import Axes
from panax.core.validation import Validated

from ..files.files import fingerprint
from ..loading.examples import hash_integers, hash_names
from .bags import LARGEST_ID


@dataclasses.dataclass(frozen=True, kw_only=True)
class SyntheticClicks(Validated):
    """Rows in the shape of Criteo's logs; row n does not depend on which other rows are read.

    Ids are Zipf-distributed. A teacher gives each row a logit: a weight for each id and number, and dot
    products of the ids' hidden vectors for some pairs of columns, which no sum over columns can express. A
    label is drawn with the logit's probability, so no model can rank better than the logit itself, with the
    area `bayes_auc`.

    A batch has `numeric` float32 (batch, numeric), `c1`, `c2`, ..., int32 (batch, 1), and `label` float32.

    Attributes:
        num_examples: Number of rows.
        rows: Number of ids of each categorical column.
        numeric: Number of numeric columns.
        zipf: Zipf exponent: the k-th most frequent id is rarer than the first by this power of k.
        linear: Standard deviation of the part of the logit that is a sum over columns.
        interaction: Standard deviation of the remaining part.
        hidden: Width of the hidden vectors.
        pairs: Number of pairs of columns that interact.
        bias: Mean of the logit.
        seed: Seed of all randomness.
    """

    num_examples: int = 2**20
    rows: tuple[int, ...] = (1000,) * 8
    numeric: int = 4
    zipf: float = 1.1
    linear: float = 1.0
    interaction: float = 1.0
    hidden: int = 2
    pairs: int = 6
    bias: float = -1.0
    seed: int = 0

    def __post_init__(self) -> None:
        if self.num_examples < 1 or not self.rows or not all(1 <= each <= LARGEST_ID for each in self.rows):
            raise RecipeError(f"num_examples={self.num_examples}, rows={self.rows}; expected at least 1 of each")
        if self.numeric < 0 or self.hidden < 1 or min(self.linear, self.interaction, self.zipf) < 0:
            raise RecipeError("numeric, linear, interaction and zipf are at least 0, and hidden at least 1")
        most = len(self.rows) * (len(self.rows) - 1) // 2
        if not 0 <= self.pairs <= most:
            raise RecipeError(f"pairs={self.pairs}; expected 0 to {most}, the pairs of {len(self.rows)} columns")

    def open(self, root: Path, max_bad_records: int) -> "SyntheticExamples":
        return SyntheticExamples(self)


class SyntheticExamples:
    """Rows of `SyntheticClicks`, drawn when they are read."""

    owns_memory = True  # of batches read: nothing else writes to them

    def __init__(self, settings: SyntheticClicks, numbers: npt.NDArray[np.int64] | None = None) -> None:
        self.settings, self._numbers = settings, numbers
        self.num_examples = settings.num_examples if numbers is None else len(numbers)
        self.leaves = tuple(f"c{number}" for number in range(1, len(settings.rows) + 1))
        numeric = {"numeric": ("batch", None)} if settings.numeric else {}
        self.axes: Mapping[str, Axes] = {"label": ("batch",), **numeric, **dict.fromkeys(self.leaves, ("batch", None))}
        self.num_ids: Mapping[str, int] = dict(zip(self.leaves, settings.rows, strict=True))
        chosen = "" if numbers is None else hash_integers(numbers)
        self.fingerprint = fingerprint("synthetic", repr(settings), chosen)
        self._teacher = _Teacher(settings)

    def read(self, numbers: npt.NDArray[np.int64]) -> dict[str, np.ndarray]:
        ids, numeric, logits, draw = self._rows(numbers)
        label = (draw < 1 / (1 + np.exp(-logits))).astype(np.float32)
        out = {"label": label, **{leaf: ids[:, at : at + 1] for at, leaf in enumerate(self.leaves)}}
        return {**out, "numeric": numeric} if self.settings.numeric else out

    def logits(self, numbers: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
        """Return the teacher's logits: the predictions of the best possible model."""
        return self._rows(numbers)[2]

    def bayes_auc(self, bins: int = 2**16) -> float:
        """Compute the expected area under the ROC curve of the teacher's probabilities over all draws of the
        labels.

        Each row counts as positive with its probability, so that the result does not depend on the labels
        drawn.
        """
        positive, negative = np.zeros(bins), np.zeros(bins)
        for begin in range(0, self.num_examples, 2**17):
            numbers = np.arange(begin, min(begin + 2**17, self.num_examples))
            probability = 1 / (1 + np.exp(-self.logits(numbers)))
            place = np.minimum((probability * bins).astype(np.int64), bins - 1)
            positive += np.bincount(place, probability, bins)
            negative += np.bincount(place, 1 - probability, bins)
        below = np.cumsum(negative) - negative
        return float((positive * (below + 0.5 * negative)).sum() / (positive.sum() * negative.sum()))

    def keys(self) -> npt.NDArray[np.uint64]:
        return hash_names(map(str, self._own(np.arange(self.num_examples)).tolist()))

    def take(self, numbers: npt.NDArray[np.int64]) -> "SyntheticExamples":
        return SyntheticExamples(self.settings, self._own(numbers))

    @property
    def times(self) -> npt.NDArray[np.float64]:
        """Return the row indices as times."""
        return self._own(np.arange(self.num_examples)).astype(np.float64)

    def _own(self, numbers: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        return numbers if self._numbers is None else self._numbers[numbers]

    def _rows(
        self, numbers: npt.NDArray[np.int64]
    ) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.float32], npt.NDArray[np.float64], npt.NDArray[np.float64]]:
        settings = self.settings
        rows = self._own(numbers)
        columns = len(settings.rows)
        uniform = _uniform(rows, columns + 2 * settings.numeric + 1, settings.seed)
        sizes = np.array(settings.rows)
        ids = np.minimum(_zipf(uniform[:, :columns], sizes, settings.zipf), sizes - 1).astype(np.int32)
        a, b = (uniform[:, columns + i * settings.numeric : columns + (i + 1) * settings.numeric] for i in range(2))
        numeric = (np.sqrt(-2 * np.log(1 - a)) * np.cos(2 * np.pi * b)).astype(np.float32)
        return ids, numeric, self._teacher.logits(ids, numeric), uniform[:, -1]


class _Teacher:
    """Weights and hidden vectors, each a hash of column and id: nothing of a table's size is stored."""

    def __init__(self, settings: SyntheticClicks) -> None:
        self._settings = settings
        rng = np.random.default_rng([settings.seed, 0x74656163])
        every = [(i, j) for i in range(len(settings.rows)) for j in range(i)]
        self._pairs = [every[at] for at in rng.permutation(len(every))[: settings.pairs].tolist()]
        self._slope = rng.standard_normal(settings.numeric)

    def logits(self, ids: npt.NDArray[np.int32], numeric: npt.NDArray[np.float32]) -> npt.NDArray[np.float64]:
        settings, columns = self._settings, ids.shape[1]
        # A sum of n terms of variance 1 has standard deviation sqrt(n).
        terms = math.sqrt(columns + max(settings.numeric, 0))
        total = sum(self._normal(ids[:, column], column, 0) for column in range(columns)) + numeric @ self._slope
        pairs = np.zeros(len(ids))
        for i, j in self._pairs:
            for place in range(1, settings.hidden + 1):
                pairs += self._normal(ids[:, i], i, place) * self._normal(ids[:, j], j, place)
        scale = math.sqrt(max(1, len(self._pairs) * settings.hidden))
        return settings.bias + settings.linear / terms * total + settings.interaction / scale * pairs

    def _normal(self, ids: npt.NDArray[np.int32], column: int, place: int) -> npt.NDArray[np.float64]:
        """Return an approximately normal value of variance 1 for each id."""
        key = (self._settings.seed * 1_000_003 + column * 1009 + place) % 2**32
        uniform = _uniform(ids.astype(np.int64), 4, key)
        return (uniform.sum(axis=1) - 2.0) * math.sqrt(3.0)


def _uniform(numbers: npt.NDArray[np.int64], count: int, seed: int) -> npt.NDArray[np.float64]:
    """Return `count` values in [0, 1) for each of `numbers`, hashed from both: the same on every machine."""
    with np.errstate(over="ignore"):
        places = numbers.astype(np.uint64)[:, None] * np.uint64(count) + np.arange(count, dtype=np.uint64)[None]
        x = places + np.uint64(seed % 2**32 + 1) * np.uint64(0x9E3779B97F4A7C15)
        for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
            x = (x ^ (x >> np.uint64(shift))) * np.uint64(factor)
        x = x ^ (x >> np.uint64(31))
    return (x >> np.uint64(11)).astype(np.float64) * 2.0**-53


def _zipf(uniform: npt.NDArray[np.float64], sizes: npt.NDArray[np.int64], exponent: float) -> npt.NDArray[np.float64]:
    """Return ids from 0, the k-th with a frequency of about (k + 1) ** -exponent, by inverting its
    integral."""
    if abs(exponent - 1.0) < 1e-6:
        return np.floor(np.exp(uniform * np.log(sizes + 1.0)) - 1.0)
    power = 1.0 - exponent
    return np.floor((1.0 + uniform * ((sizes + 1.0) ** power - 1.0)) ** (1.0 / power) - 1.0)
