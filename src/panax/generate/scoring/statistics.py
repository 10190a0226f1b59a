"""Estimates with confidence intervals over independent rows, and the estimator of pass@k."""

import math
from collections.abc import Sequence
from typing import NamedTuple

NORMAL_QUANTILE = 1.959963984540054
"""Of a two-sided interval of 95 %."""


class Estimate(NamedTuple):
    """A figure with its interval of 95 %.

    Attributes:
        low, high: NaN for a single row, which has no spread.
    """

    value: float
    low: float
    high: float
    rows: int


def estimate_ratio(
    numerators: Sequence[float], denominators: Sequence[float], *, bounds: tuple[float, float] = (-math.inf, math.inf)
) -> Estimate:
    """Estimate the sum of one figure over the sum of another, such as bits per byte.

    Rows are the independent units, however many samples each has: the interval is that of a ratio of sums over clusters
    (linearized). A mean over rows is the ratio to ones.

    Args:
        bounds: Smallest and largest possible value.

    >>> estimate_ratio([1.0, 0.0, 1.0, 1.0], [1.0] * 4)[0]
    0.75
    """
    total, count = math.fsum(denominators), len(numerators)
    if not count or total == 0.0:
        return Estimate(math.nan, math.nan, math.nan, count)
    value = math.fsum(numerators) / total
    if count < 2:
        return Estimate(value, math.nan, math.nan, count)
    squares = math.fsum((a - value * b) ** 2 for a, b in zip(numerators, denominators, strict=True))
    error = NORMAL_QUANTILE * math.sqrt(squares * count / (count - 1)) / total
    return Estimate(value, max(value - error, bounds[0]), min(value + error, bounds[1]), count)


def pass_at_k(samples: int, correct: int, k: int) -> float:
    """Return the probability that one of k samples is correct, estimated without bias from more (arXiv:2107.03374).

    >>> pass_at_k(4, 1, 1), pass_at_k(4, 1, 2), pass_at_k(4, 3, 2)
    (0.25, 0.5, 1.0)
    """
    return 1.0 - math.comb(samples - correct, k) / math.comb(samples, k)
