"""Losses and metrics as sums that merge exactly, over micro-batches, replicas and evaluation batches.

A mean of means is wrong as soon as batches hold different numbers of tokens. So a `Task` returns sums with their weights,
and the one division happens where all sums have met.
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
"""What a metric counts: a number, or one for each layer, expert or the like."""


Numbers = Num[Array, "..."]
"""The same, of whole numbers too."""


class Loss(eqx.Module):
    """One named term of the objective: `coefficient * sum / weight`, with sum and weight over the whole global batch.

    Attributes:
        sum: Added over tokens, rows or whatever the weight counts.
        weight: What the sum is divided by, once. It may depend on the batch but not on the parameters.
        coefficient: The term's share in the total.
    """

    sum: Scalar
    weight: Scalar
    coefficient: Scalar | float = 1.0

    @property
    def mean(self) -> Scalar:
        """`sum / weight`; zero where nothing was counted, NaN where the weight is not a sum of weights."""
        return _ratio(self.sum, self.weight)

    def merge(self, other: "Loss") -> "Loss":
        return Loss(self.sum + other.sum, self.weight + other.weight, other.coefficient)


Losses = Mapping[str, Loss]


class Mean(eqx.Module):
    """A metric that is averaged by weight."""

    sum: Values
    weight: Values

    @property
    def value(self) -> Values:
        return _ratio(self.sum, self.weight)

    def merge(self, other: "Mean") -> "Mean":
        return Mean(self.sum + other.sum, self.weight + other.weight)


class Sum(eqx.Module):
    """A metric that is added up, such as a count of tokens: float32, or whole numbers below 2**31 in all."""

    value: Numbers

    def merge(self, other: "Sum") -> "Sum":
        return Sum(self.value + other.value)


class Maximum(eqx.Module):
    """A metric of which the largest is kept."""

    value: Numbers

    def merge(self, other: "Maximum") -> "Maximum":
        return Maximum(jnp.maximum(self.value, other.value))


class RocHistogram(eqx.Module):
    """How often examples of each class have a score in each of equal bins of [0, 1]: the area under the ROC curve, as a sum.

    Attributes:
        value: Counts, negative examples first; exact, and the same in any order.
        weight: The same as sums of the examples' weights, NaN where a score was.
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
            probability: In [0, 1]; of NaN there is no area.
            label: Above 0.5 for positive examples.
            counted: Each example's weight; 0 leaves it out.
        """
        place = jnp.clip(jnp.nan_to_num(probability) * bins, 0, bins - 1).astype(jnp.int32)
        flat = jnp.where(counted != 0, place + bins * (label > 0.5).astype(jnp.int32), 2 * bins)
        weight = jnp.where(jnp.isnan(probability), jnp.nan, counted.astype(jnp.float32))
        sums = (jnp.zeros(2 * bins, x.dtype).at[flat].add(x, mode="drop") for x in (jnp.ones_like(flat), weight))
        return cls(*(each.reshape(2, bins) for each in sums))

    def merge(self, other: "RocHistogram") -> "RocHistogram":
        return RocHistogram(self.value + other.value, self.weight + other.weight)

    def figures(self) -> dict[str, float]:
        """The area, where two scores of a bin count as equal, and by how much that can be wrong at most; on the host.

        Half of the pairs of a bin that are ordered the other way is the bound, as 0.5 of each was counted. A pair counts by the
        product of its weights.
        """
        counts, weights = (np.asarray(each).astype(np.float64) for each in (self.value, self.weight))
        # Weights of 1 are counted, since their float32 sums end at 2**24.
        negative, positive = counts if np.array_equal(counts.astype(np.float32), weights) else weights
        pairs = negative.sum() * positive.sum()
        if not pairs or math.isnan(pairs):
            return {"": math.nan, "_error_bound": math.nan}
        below = np.cumsum(negative) - negative
        tied = (positive * negative).sum()
        return {"": float(((positive * below).sum() + 0.5 * tied) / pairs), "_error_bound": float(0.5 * tied / pairs)}


class MeanWithInterval(eqx.Module):
    """The mean of independent numbers with what is known of it: their spread, and an interval of confidence.

    Attributes:
        count: How many numbers.
        mean: Theirs.
        squares: The sum of their squared distances from it.
    """

    count: Scalar
    mean: Scalar
    squares: Scalar

    @classmethod
    def of(cls, numbers: Float[Array, " batch"], counted: Float[Array, " batch"]) -> "MeanWithInterval":
        """Count a batch's numbers.

        Args:
            counted: 1, or 0 to leave a number out.
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

    def figures(self) -> dict[str, float]:
        """The standard deviation, and half the width of the mean's 95 % interval of confidence; NaN of fewer than two numbers.

        Student's t, by Cornish and Fisher's expansion: within 1 % of the true width from 4 numbers on. On the host.
        """
        count, squares = float(self.count), float(self.squares)
        if count < 2:
            return {"_std": math.nan, "_ci95": math.nan}
        deviation = math.sqrt(squares / (count - 1))
        return {"_std": deviation, "_ci95": _student(count - 1) * deviation / math.sqrt(count)}


def _student(freedom: float, z: float = 1.959964) -> float:
    """The 97.5 % quantile of Student's distribution (Abramowitz and Stegun, 26.7.5).

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
"""The worst value of a check that found nothing."""

_MINUS_INFINITY = float(np.finfo(np.float32).min)
"""Stands for minus infinity where a check finds that."""


def as_fault(value: Values) -> Values:
    """An offending value as a check's worst one, also minus infinity, which alone would say that nothing was found."""
    return jnp.where(value == NO_FAULT, jnp.asarray(_MINUS_INFINITY, value.dtype), value)


class DataChecks(eqx.Module):
    """What a compiled step found wrong with its data, and can't raise: it is not applied, and who reads the step raises.

    Attributes:
        worst: For each check the worst offending value, `NO_FAULT` where there is none.
        checks: What is wrong where one fails; the value follows it.
        advice: What the user can do.
    """

    worst: Values
    checks: tuple[str, ...] = eqx.field(static=True)
    advice: str = eqx.field(static=True, default="correct the data, or the model. Nothing was updated")

    @property
    def value(self) -> Values:
        return self.worst

    @property
    def any(self) -> Array:
        """Whether a check failed."""
        return (self.worst != NO_FAULT).any()

    def merge(self, other: "DataChecks") -> "DataChecks":
        return DataChecks(jnp.maximum(self.worst, other.worst), self.checks, self.advice)

    def refuse(self, where: str) -> None:
        """Raise what the checks found; waits for the devices.

        Raises:
            DataError: A check failed.
        """
        for text, worst in zip(self.checks, jax.device_get(self.worst)):
            if worst != NO_FAULT:
                shown = -math.inf if worst == _MINUS_INFINITY else float(worst)
                raise DataError(f"{where}: {text}{shown:.10g}; {self.advice}")


Metric = Mean | Sum | Maximum | RocHistogram | MeanWithInterval | DataChecks
Metrics = Mapping[str, Metric]


def _ratio(total: Values, weight: Values) -> Values:
    mean = jnp.where(weight > 0, total / jnp.where(weight > 0, weight, 1.0), 0.0)
    # A weight that is negative or NaN comes from a broken mask. Its root is NaN: the result must not look as if it were right.
    return mean + 0.0 * jnp.sqrt(weight)


RESERVED = frozenset(
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
"""What a step or an evaluation reports itself."""


def is_reserved(name: str) -> bool:
    """True if a step or an evaluation reports something of this name itself, which a metric would hide.

    >>> is_reserved("loss"), is_reserved("train_loss")
    (True, False)
    """
    return name in RESERVED or name.startswith("loss/")


def counted_fields(measure: Any) -> tuple[str, ...]:
    """The fields of a loss or metric that merge: not a loss's coefficient, nor what is static."""
    fields = type(measure).__dataclass_fields__
    return tuple(name for name, field in fields.items() if name != "coefficient" and not field.metadata.get("static"))


def keeps_largest(measure: Any) -> bool:
    """True if the measure merges by its largest value, not by a sum."""
    return isinstance(measure, Maximum | DataChecks)


def neutral_value(measure: Any, dtype: Any) -> Any:
    """The value that changes nothing when it is merged."""
    if not keeps_largest(measure):
        return np.zeros((), dtype)[()]
    return np.asarray(-np.inf, dtype)[()] if jnp.issubdtype(dtype, jnp.floating) else jnp.iinfo(dtype).min


def is_measure(x: Any) -> bool:
    """Whether a pytree node is a loss or a metric."""
    return isinstance(x, Loss | Mean | Sum | Maximum | RocHistogram | MeanWithInterval | DataChecks)


def merge_measures(a: Any, b: Any) -> Any:
    """Merge two trees of losses and metrics of the same structure, each by its own reduction."""
    return jax.tree.map(lambda x, y: x.merge(y), a, b, is_leaf=is_measure)


def merge_stacked(stacked: Any, count: int) -> Any:
    """Merge a tree of measures whose arrays carry a leading axis of `count` micro-batches."""

    # By a loop: unrolled, each measure would be some equations for each micro-batch.
    def merge(merged: Any, part: Any) -> tuple[Any, None]:
        return merge_measures(merged, part), None

    first, rest = (jax.tree.map(lambda leaf, at=at: leaf[at], stacked) for at in (0, slice(1, None)))
    return first if count == 1 else jax.lax.scan(merge, first, rest, length=count - 1)[0]


def total_loss(losses: Losses, weights: Mapping[str, Scalar] | None = None) -> Scalar:
    """The objective: the sum over terms of `coefficient * sum / weight`.

    Args:
        weights: What to divide by, where these losses are only a part of the global batch; their own weights otherwise.
    """
    total = jnp.float32(0.0)
    for name, loss in losses.items():
        weight = jax.lax.stop_gradient(loss.weight if weights is None else weights[name])
        total = total + loss.coefficient * _ratio(loss.sum, weight)
    return total
