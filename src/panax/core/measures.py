"""Losses and metrics as sums that merge exactly over micro-batches, replicas and evaluation batches.

A mean of means is wrong as soon as batches hold different numbers of tokens. A `Task` therefore returns sums
with their weights, and a single division follows once all sums are merged.
"""

import math
from collections.abc import Mapping
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, Num

from .errors import DataError

Scalar = Float[Array, ""]

Values = Float[Array, "..."]
"""Value of a metric: a scalar, or one value per layer, expert or the like."""


Numbers = Num[Array, "..."]
"""The same, also of integers."""


class Loss(eqx.Module):
    """One named term of the objective: `coefficient * sum / weight`, with sum and weight over the whole
    global batch.

    Attributes:
        sum: Sum over tokens, rows or other items that the weight counts.
        weight: Divisor of the sum, applied once. It may depend on the batch but not on the parameters.
        coefficient: Factor of the term in the total loss.
    """

    sum: Scalar
    weight: Scalar
    coefficient: Scalar | float = 1.0

    @property
    def mean(self) -> Scalar:
        """Return `sum / weight`; zero if nothing was counted, NaN if the weight is negative or NaN."""
        return _ratio(self.sum, self.weight)

    def merge(self, other: "Loss") -> "Loss":
        return Loss(self.sum + other.sum, self.weight + other.weight, other.coefficient)


Losses = Mapping[str, Loss]
"""A task's losses by name; `total_loss` adds them."""


class Mean(eqx.Module):
    """A metric averaged by weight."""

    sum: Values
    weight: Values

    @property
    def value(self) -> Values:
        return _ratio(self.sum, self.weight)

    def merge(self, other: "Mean") -> "Mean":
        return Mean(self.sum + other.sum, self.weight + other.weight)


class Sum(eqx.Module):
    """A metric that is summed, such as a count of tokens: float32, or integers with a total below 2**31."""

    value: Numbers

    def merge(self, other: "Sum") -> "Sum":
        return Sum(self.value + other.value)


class Maximum(eqx.Module):
    """A metric that is reported as its maximum."""

    value: Numbers

    def merge(self, other: "Maximum") -> "Maximum":
        return Maximum(jnp.maximum(self.value, other.value))


class RocHistogram(eqx.Module):
    """Histogram of scores in equal bins of [0, 1] per class, from which the area under the ROC curve follows.

    Attributes:
        value: Counts, negative examples first; exact, and independent of order.
        weight: Sums of the examples' weights in the same bins; NaN if a score was NaN.
    """

    value: Int[Array, "2 bin"]
    weight: Float[Array, "2 bin"]

    @classmethod
    def of(
        cls,
        probability: Float[Array, " batch"],
        label: Float[Array, " batch"],
        counted: Float[Array, " batch"],
        bins: int,
    ) -> "RocHistogram":
        """Count a batch's examples.

        Args:
            probability: Scores in [0, 1]; with a NaN there is no area.
            label: Above 0.5 for positive examples.
            counted: Weight of each example; 0 omits it.
        """
        place = jnp.clip(jnp.nan_to_num(probability) * bins, 0, bins - 1).astype(jnp.int32)
        flat = jnp.where(counted != 0, place + bins * (label > 0.5).astype(jnp.int32), 2 * bins)
        weight = jnp.where(jnp.isnan(probability), jnp.nan, counted.astype(jnp.float32))
        sums = (jnp.zeros(2 * bins, x.dtype).at[flat].add(x, mode="drop") for x in (jnp.ones_like(flat), weight))
        return cls(*(each.reshape(2, bins) for each in sums))

    def merge(self, other: "RocHistogram") -> "RocHistogram":
        return RocHistogram(self.value + other.value, self.weight + other.weight)

    def statistics(self) -> dict[str, float]:
        """Compute the area, with scores in the same bin counted as equal, and its maximum error; on the host.

        The error bound is half of the pairs within a bin: all of them could be ordered either way, and 0.5 of
        each was counted. A pair counts by the product of its weights.
        """
        counts, weights = (np.asarray(each).astype(np.float64) for each in (self.value, self.weight))
        # If all weights are 1, use the integer counts: a float32 sum of ones stops growing at 2**24.
        negative, positive = counts if np.array_equal(counts.astype(np.float32), weights) else weights
        pairs = negative.sum() * positive.sum()
        if not pairs or math.isnan(pairs):
            return {"": math.nan, "_error_bound": math.nan}
        below = np.cumsum(negative) - negative
        tied = (positive * negative).sum()
        return {"": float(((positive * below).sum() + 0.5 * tied) / pairs), "_error_bound": float(0.5 * tied / pairs)}


class MeanWithInterval(eqx.Module):
    """The mean of independent values with their standard deviation and a confidence interval.

    Attributes:
        count: Number of values.
        mean: Mean of the values.
        squares: Sum of their squared deviations from the mean.
    """

    count: Scalar
    mean: Scalar
    squares: Scalar

    @classmethod
    def of(cls, numbers: Float[Array, " batch"], counted: Float[Array, " batch"]) -> "MeanWithInterval":
        """Count a batch's values.

        Args:
            counted: 1, or 0 to omit a value.
        """
        count = counted.sum()
        mean = jnp.where(counted > 0, numbers, 0.0).sum() / jnp.maximum(count, 1.0)
        return cls(count, mean, (jnp.where(counted > 0, numbers - mean, 0.0) ** 2).sum())

    @property
    def value(self) -> Values:
        return self.mean

    def merge(self, other: "MeanWithInterval") -> "MeanWithInterval":
        count = self.count + other.count
        share = other.count / jnp.maximum(count, 1.0)
        apart = other.mean - self.mean
        return MeanWithInterval(
            count,
            self.mean + apart * share,
            self.squares + other.squares + apart * apart * self.count * share,
        )

    def statistics(self) -> dict[str, float]:
        """Compute the standard deviation and the half-width of the mean's 95 % confidence interval, on the
        host; NaN for fewer than two values.

        The interval uses Student's t by the Cornish-Fisher expansion, within 1 % of the exact width from 4
        values on.
        """
        count, squares = float(self.count), float(self.squares)
        if count < 2:
            return {"_std": math.nan, "_ci95": math.nan}
        deviation = math.sqrt(squares / (count - 1))
        return {"_std": deviation, "_ci95": _student(count - 1) * deviation / math.sqrt(count)}


def _student(freedom: float, z: float = 1.959964) -> float:
    """Compute the 97.5 % quantile of Student's t-distribution (Abramowitz and Stegun, 26.7.5).

    >>> [round(_student(n), 2) for n in (3.0, 10.0, 100.0)]
    [3.18, 2.23, 1.98]
    """
    terms = (
        z,
        (z**3 + z) / 4,
        (5 * z**5 + 16 * z**3 + 3 * z) / 96,
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384,
        (79 * z**9 + 776 * z**7 + 1482 * z**5 - 1920 * z**3 - 945 * z) / 92160,
    )
    return sum(term / freedom**power for power, term in enumerate(terms))


NO_FAULT = -jnp.inf
"""Worst value of a check that found nothing."""

_MINUS_INFINITY = float(np.finfo(np.float32).min)
"""Replaces minus infinity as an offending value."""


def as_fault(value: Values) -> Values:
    """Return an offending value for a check; minus infinity, which would mean no fault, is replaced by the lowest
    finite value."""
    return jnp.where(value == NO_FAULT, jnp.asarray(_MINUS_INFINITY, value.dtype), value)


class DataChecks(eqx.Module):
    """Invalid data found inside a compiled step, which cannot raise: the step is not applied, and its caller
    raises.

    Attributes:
        worst: For each check the worst offending value, or `NO_FAULT`.
        checks: Message of each failed check, followed by the value.
        advice: Fix to suggest to the user.
    """

    worst: Values
    checks: tuple[str, ...] = eqx.field(static=True)
    advice: str = eqx.field(static=True, default="correct the data, or the model. Nothing was updated")

    @property
    def value(self) -> Values:
        return self.worst

    @property
    def has_failed(self) -> Array:
        """Return True if a check failed."""
        return (self.worst != NO_FAULT).any()

    def merge(self, other: "DataChecks") -> "DataChecks":
        return DataChecks(jnp.maximum(self.worst, other.worst), self.checks, self.advice)

    def raise_if_failed(self, where: str) -> None:
        """Raise an error for failed checks; waits for the devices.

        Raises:
            DataError: A check failed.
        """
        for text, worst in zip(self.checks, jax.device_get(self.worst)):
            if worst != NO_FAULT:
                value = -math.inf if worst == _MINUS_INFINITY else float(worst)
                raise DataError(f"{where}: {text}{value:.10g}; {self.advice}")


Metric = Mean | Sum | Maximum | RocHistogram | MeanWithInterval | DataChecks
Metrics = Mapping[str, Metric]
"""A task's metrics by name."""


def _ratio(total: Values, weight: Values) -> Values:
    mean = jnp.where(weight > 0, total / jnp.where(weight > 0, weight, 1.0), 0.0)
    # A negative or NaN weight comes from a broken mask. Its square root is NaN, so the result is NaN and not
    # plausible.
    return mean + 0.0 * jnp.sqrt(weight)


RESERVED_NAMES = frozenset(
    (
        "loss",
        "gradient_norm",
        "learning_rate",
        "skipped",
        "skipped_in_a_row",
        "loss_scale",
        "updates",
        "ema_decay",
        "averaged",
    )
)
"""Names that a step or an evaluation reports itself."""


def is_reserved(name: str) -> bool:
    """Return True if a step or an evaluation itself reports a value under this name, which a metric would
    overwrite.

    >>> is_reserved("loss"), is_reserved("train_loss")
    (True, False)
    """
    return name in RESERVED_NAMES or name.startswith("loss/")


def merged_fields(measure: Any) -> tuple[str, ...]:
    """Return the fields of a loss or metric that are merged: all but static ones and a loss's coefficient."""
    fields = type(measure).__dataclass_fields__
    return tuple(name for name, field in fields.items() if name != "coefficient" and not field.metadata.get("static"))


def merges_by_max(measure: Any) -> bool:
    """Return True if the measure merges by maximum instead of by sum."""
    return isinstance(measure, Maximum | DataChecks)


def neutral_value(measure: Any, dtype: Any) -> Any:
    """Return the identity element of the measure's reduction."""
    if not merges_by_max(measure):
        return np.zeros((), dtype)[()]
    return np.asarray(-np.inf, dtype)[()] if jnp.issubdtype(dtype, jnp.floating) else jnp.iinfo(dtype).min


def is_measure(x: Any) -> bool:
    """Return True if a pytree node is a loss or a metric."""
    return isinstance(x, Loss | Mean | Sum | Maximum | RocHistogram | MeanWithInterval | DataChecks)


def merge_measures(a: Any, b: Any) -> Any:
    """Merge two trees of losses and metrics of the same structure, each leaf by its reduction."""
    return jax.tree.map(lambda x, y: x.merge(y), a, b, is_leaf=is_measure)


def merge_stacked(stacked: Any, count: int) -> Any:
    """Merge a tree of measures with arrays that have a leading axis of `count` micro-batches."""

    # Scanned, since an unrolled loop would add equations for each measure and micro-batch.
    def merge(merged: Any, part: Any) -> tuple[Any, None]:
        return merge_measures(merged, part), None

    first, rest = (jax.tree.map(lambda leaf, at=at: leaf[at], stacked) for at in (0, slice(1, None)))
    return first if count == 1 else jax.lax.scan(merge, first, rest, length=count - 1)[0]


def total_loss(losses: Losses, weights: Mapping[str, Scalar] | None = None) -> Scalar:
    """Compute the objective: the sum over terms of `coefficient * sum / weight`.

    Args:
        weights: Divisors to use if these losses cover only a part of the global batch; by default their own
            weights.
    """
    total = jnp.float32(0.0)
    for name, loss in losses.items():
        weight = jax.lax.stop_gradient(loss.weight if weights is None else weights[name])
        total = total + loss.coefficient * _ratio(loss.sum, weight)
    return total
