"""Value ranges of the leaves of a batch, checked on entry with the same rules for inputs and targets.

A value out of range does not look wrong on a device: a target id outside of the vocabulary has a logit of 0,
a label of 5 makes a log loss decrease forever, an 8-bit id wraps around. A task therefore declares the
allowed values of each leaf (`Task.leaf_ranges`).
"""

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from .errors import DataError
from .measures import NO_FAULT, DataChecks, as_fault

ROW_LEAF = "row"
"""Leaf of every batch with each row's index in the global batch; the step adds it if the source does not."""

MASK_LEAF = "loss_mask"
"""Leaf with the weight of each row or position in the loss."""

ADVANTAGE_LEAF = "advantage"
"""Leaf with the advantage of each action of a rollout."""

BEHAVIOR_LEAF = "behavior_log_probability"
"""Leaf with the log-probability of each action under the distribution that it was drawn from."""

OLD_LEAF = "old_log_probability"
"""Leaf with the trainer's log-probability of each action, before the first update of its rollout."""

REFERENCE_LEAF = "reference_log_probability"
"""Leaf with the reference model's log-probability of each target."""

OLD_VALUE_LEAF = "old_value"
"""Leaf with the value of each action by the trainer, before the first update of its rollout."""

RETURN_LEAF = "return"
"""Leaf with the return of each action, which its value is to estimate."""

KEPT_LEAF = "kept_tokens"
"""Leaf with the ids of tokens among which each action was drawn, the likeliest first, (batch, seq, candidate)."""

KEPT_COUNT_LEAF = "kept_count"
"""Leaf with the number of them, from the first; the ids after these could not be drawn."""

EXPERTS_LEAF = "experts"
"""Leaf with the experts that each position was drawn with, of each mixture layer; -1 for any."""


class LeafRange(NamedTuple):
    """The allowed values of one leaf of a batch.

    Attributes:
        low: Minimum value.
        high: Maximum value, inclusive.
        integral: True if the leaf holds integers, such as ids and labels.
        counted_by: Leaf of weights; a value is only checked if its weight is nonzero. None to check every
            value.
        advice: Fix to suggest to the user for a value out of range.
        checked: False for features, which may have any value: a non-finite one makes the loss NaN, and the
            guard skips the step. Features are still converted to float32.
    """

    low: float = -math.inf
    high: float = math.inf
    integral: bool = False
    counted_by: str | None = None
    advice: str = "correct the data"
    checked: bool = True

    @property
    def description(self) -> str:
        """Format the range for messages.

        >>> LeafRange(0, 9, integral=True).description, LeafRange(0.0).description, LeafRange().description
        ('0 to 9', '0 or more', 'finite numbers')
        """
        if math.isfinite(self.low) and math.isfinite(self.high):
            return f"{self.low:g} to {self.high:g}" if not self.integral else f"{int(self.low)} to {int(self.high)}"
        if math.isfinite(self.low):
            return f"{self.low:g} or more"
        return f"{self.high:g} or less" if math.isfinite(self.high) else "finite numbers"


def id_range(count: int, *, counted_by: str | None = None, least: int = 0, advice: str = "") -> LeafRange:
    """Return the range of ids below `count`.

    Args:
        least: The smallest id; -1 if -1 means no id.
        advice: The setting that would allow larger ids.
    """
    full_advice = "correct the data" + (f", or {advice}" if advice else "")
    return LeafRange(least, count - 1, integral=True, counted_by=counted_by, advice=full_advice)


UNCHECKED_RANGE = LeafRange(checked=False)
"""Range of features: any value."""

WEIGHT_RANGE = LeafRange(0.0, advice="give 0 to exclude something, and a positive weight otherwise")
"""Range of weights, such as `loss_mask`."""


def as_leaf_range(allowed: range | LeafRange) -> LeafRange:
    """Convert a `range` of integers to a `LeafRange`."""
    return allowed if isinstance(allowed, LeafRange) else id_range(allowed.stop, least=allowed.start)


Ranges = Mapping[str, range | LeafRange]


def check_ranges(batch: Mapping[str, np.ndarray], ranges: Ranges) -> None:
    """Check that each leaf holds values that the task allows.

    Raises:
        DataError: A leaf holds another value, or values of another type.
    """
    for name, declared_range in ranges.items():
        if name not in batch or batch[name].size == 0:
            continue
        leaf, allowed = batch[name], as_leaf_range(declared_range)
        _check_type(name, leaf, allowed)
        if not allowed.checked:
            continue
        outside = _outside(leaf, allowed)
        weight = batch.get(allowed.counted_by or "")
        if weight is not None and outside.any():
            outside &= _expand_weight(weight, leaf, name, allowed) != 0
        if outside.any():
            raise DataError(_outside_message(name, leaf, outside, allowed))


def _check_type(name: str, leaf: np.ndarray, allowed: LeafRange) -> None:
    kinds = "iub" if allowed.integral else "iubf"
    if leaf.dtype.kind not in kinds and leaf.dtype.name != "bfloat16":
        raise DataError(
            f"the batch's leaf {name!r} holds {leaf.dtype}; expected {'integers' if allowed.integral else 'numbers'}: convert it "
            f"(`.astype(numpy.{'int32' if allowed.integral else 'float32'})`)"
        )
    if allowed.integral and leaf.dtype.name == "bfloat16":
        raise DataError(f"the batch's leaf {name!r} holds bfloat16; expected integers: convert it")


def _outside(leaf: np.ndarray, allowed: LeafRange) -> np.ndarray:
    # Most batches are valid, which two passes without a temporary array show. With a NaN, min and max are
    # NaN.
    low, high = leaf.min(), leaf.max()
    if low >= allowed.low and high <= allowed.high and (allowed.integral or np.isfinite([low, high]).all()):
        return np.zeros((1,) * leaf.ndim, np.bool_)
    outside = ~((leaf >= allowed.low) & (leaf <= allowed.high))
    return outside if allowed.integral else outside | ~np.isfinite(leaf)


def _expand_weight(weight: np.ndarray, leaf: np.ndarray, name: str, allowed: LeafRange) -> np.ndarray:
    """Reshape weights to the leaf's number of dimensions."""
    if weight.shape != leaf.shape[: weight.ndim]:
        raise DataError(
            f"the batch's leaf {allowed.counted_by!r} has the shape {weight.shape}, and {name!r} {leaf.shape}; expected one "
            f"weight for each value, or for each row"
        )
    return weight.reshape(*weight.shape, *(1,) * (leaf.ndim - weight.ndim))


def _outside_message(name: str, leaf: np.ndarray, outside: np.ndarray, allowed: LeafRange) -> str:
    index = np.argwhere(np.broadcast_to(outside, leaf.shape))[0].tolist()
    value = leaf[tuple(index)]
    where = f" where its {allowed.counted_by!r} is not 0" if allowed.counted_by else ""
    ignored = allowed.integral and value == -100 and allowed.counted_by is not None
    hint = f": -100 does not mean ignored here, set {allowed.counted_by} to 0 there" if ignored else ""
    value_text = str(int(value)) if allowed.integral else f"{float(value):.6g}"
    expected = f"this task takes {allowed.description}{where}{hint}; {allowed.advice}"
    return f"the batch's leaf {name!r} holds {value_text} at {index}; {expected}"


def narrow_to_32_bits(batch: Mapping[str, np.ndarray], ranges: Ranges) -> dict[str, np.ndarray]:
    """Convert 64-bit integers and unsigned ids to int32; other leaves are unchanged.

    A value of a leaf with a range that does not fit into int32 is clipped, so it stays out of range.

    Raises:
        DataError: A value without a range does not fit.

    >>> narrow_to_32_bits({"label": np.array([2**40, 3])}, {"label": range(9)})["label"].tolist()
    [2147483647, 3]
    """
    bounds = np.iinfo(np.int32)
    new_batch = dict(batch)
    for name, leaf in batch.items():
        known = name in ranges and as_leaf_range(ranges[name]).integral
        if leaf.dtype.kind not in "iu" or leaf.dtype.itemsize < (4 if known else 8) or leaf.dtype == np.int32:
            continue
        if not known and leaf.size and (leaf.min() < bounds.min or leaf.max() > bounds.max):
            raise DataError(
                f"the batch's leaf {name!r} holds {leaf.dtype} of {int(leaf.min()):,} to {int(leaf.max()):,}; devices compute in "
                f"32 bits: keep it within {bounds.min:,} and {bounds.max:,}"
            )
        new_batch[name] = np.clip(leaf, max(bounds.min, np.iinfo(leaf.dtype).min), bounds.max).astype(np.int32)
    return new_batch


def find_faults(batch: Mapping[str, jax.Array], ranges: Ranges) -> DataChecks | None:
    """Check a batch on the devices, for a job of several processes: every process gets the faults of rows in
    any process.

    Returns:
        One check per leaf that has a range; None without any.
    """
    checks, worst = [], []
    for name, declared_range in ranges.items():
        if name not in batch or batch[name].size == 0 or not as_leaf_range(declared_range).checked:
            continue
        leaf, allowed = batch[name], as_leaf_range(declared_range)
        value = leaf.astype(jnp.float32)
        if allowed.integral:
            bounds = np.iinfo(np.int32)
            low, high = (int(min(max(bound, bounds.min), bounds.max)) for bound in (allowed.low, allowed.high))
            number = leaf.astype(jnp.int32)
            inside = (number >= low) & (number <= high)
        else:
            inside = (value >= allowed.low) & (value <= allowed.high) & jnp.isfinite(value)
        weight = batch.get(allowed.counted_by or "")
        if weight is not None:
            inside |= ~weight.reshape(*weight.shape, *(1,) * (leaf.ndim - weight.ndim)).astype(jnp.bool_)
        worst.append(jnp.where(inside, NO_FAULT, as_fault(value)).max())
        checks.append(f"the leaf {name!r} holds a value outside of {allowed.description} ({allowed.advice}): ")
    return DataChecks(jnp.stack(worst), tuple(checks)) if checks else None


def convert_to_32_bits(batch: Mapping[str, Any], ranges: Ranges) -> dict[str, Any]:
    """Convert ids, labels and counts to int32, and weights and other values to float32.

    Arithmetic in a narrow type wraps around: row 257 is row 1 in uint8. A batch is sent in its narrow type
    and widened on the device. Leaves without a range, such as pixels, are unchanged.
    """
    new_batch = dict(batch)
    for name, declared_range in ranges.items():
        if name in new_batch:
            leaf = new_batch[name]
            if as_leaf_range(declared_range).integral:
                new_batch[name] = leaf.astype(jnp.int32)
            elif not jnp.issubdtype(leaf.dtype, jnp.floating) or jnp.finfo(leaf.dtype).bits < 32:
                new_batch[name] = leaf.astype(jnp.float32)
    return new_batch


def skip_masked_rows(batch: Mapping[str, Any], ranges: Ranges) -> dict[str, Any]:
    """Set the ids of rows with zero weight to -1, in leaves that allow -1 for no id.

    Padding rows hold zeros, so row 0 of a table would otherwise count as used in each step.
    """
    mask = batch.get(MASK_LEAF)
    new_batch = dict(batch)
    if mask is None or mask.ndim != 1:
        return new_batch
    for name, declared_range in ranges.items():
        allowed = as_leaf_range(declared_range)
        if name in new_batch and allowed.integral and allowed.low == -1:
            leaf = new_batch[name]
            counts = mask.reshape(-1, *(1,) * (leaf.ndim - 1)).astype(jnp.bool_)
            new_batch[name] = jnp.where(counts, leaf, jnp.asarray(-1, leaf.dtype))
    return new_batch
