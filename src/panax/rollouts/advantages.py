"""Advantages of sampled answers: each answer's reward, compared with those of other answers."""

from typing import Literal, NamedTuple, get_args

import numpy as np
from jaxtyping import Bool, Float, Int

from ..core.errors import RecipeError, suggest_name

Baseline = Literal["group", "others", "batch", "none"]
"""Rewards that an answer's reward is compared with: the mean of its group, of the other answers of its group
(RLOO), or of the batch (REINFORCE++); or 0."""

Scale = Literal["group", "batch", "none"]
"""Standard deviation that advantages are divided by: that of the group's rewards or of the batch's, or none (Dr.
GRPO)."""

_SCALES: dict[str, tuple[str, ...]] = {
    "group": ("group", "batch", "none"),
    "others": ("group", "batch", "none"),
    # Without the mean of the same answers, equal rewards would be divided by epsilon alone.
    "batch": ("batch", "none"),
    "none": ("none",),
}


class AnswerAdvantages(NamedTuple):
    """Advantages of a batch of answers.

    Attributes:
        values: The advantages; 0 for answers that don't count.
        has_signal: One flag for each group, in the order of the sorted numbers of the groups: True if an answer of
            the group has an advantage other than 0.
    """

    values: Float[np.ndarray, " answers"]
    has_signal: Bool[np.ndarray, " groups"]


def compute_advantages(
    rewards: Float[np.ndarray, " answers"],
    groups: Int[np.ndarray, " answers"],
    counted: Bool[np.ndarray, " answers"],
    *,
    baseline: Baseline = "group",
    scale: Scale = "group",
    epsilon: float = 1e-4,
) -> AnswerAdvantages:
    """Compute the advantage of each answer within its group or its batch.

    A baseline of the group needs at least two counted answers: a single one has the advantage 0. If all counted
    rewards that a baseline compares are exactly equal, the advantages are exactly 0, whatever rounding makes of
    their mean.

    Args:
        rewards: Total reward of each answer; finite where `counted`. The sums are float64.
        groups: Number of each answer's group, in any order: the answers of one prompt.
        counted: False for an answer without a reward; it takes part in no mean.
        scale: "group" needs a baseline of the group. With `baseline="others"`, "batch" subtracts the mean of all
            advantages and divides by their deviation, as TRL's RLOO does.
        epsilon: Added to the standard deviation, which has Bessel's correction.

    Raises:
        RecipeError: `baseline` and `scale` don't go together, or are unknown.
        ValueError: A counted reward is not finite.

    Source: group, DeepSeekMath (arXiv:2402.03300), section 4.1; others, RLOO (arXiv:2402.14740); batch, REINFORCE++
    (arXiv:2501.03262); no scale, Dr. GRPO (arXiv:2503.20783). Checked against TRL 1.16.

    >>> every = np.ones(4, bool)
    >>> compute_advantages(np.array([1.0, 0.0, 2.0, 2.0]), np.array([0, 0, 1, 1]), every, scale="none")
    AnswerAdvantages(values=array([ 0.5, -0.5,  0. ,  0. ]), has_signal=array([ True, False]))
    """
    check_advantage_settings(baseline, scale)
    if not np.isfinite(rewards[counted]).all():
        raise ValueError(f"the rewards of {np.flatnonzero(counted & ~np.isfinite(rewards)).tolist()} are not finite")
    reward = np.where(counted, rewards, 0.0).astype(np.float64)
    names, group = np.unique(groups, return_inverse=True)
    batch = np.zeros_like(group)
    if baseline == "none":
        advantage = reward
    elif baseline == "batch":
        advantage = np.where(_differs(reward, batch, counted), reward - _mean(reward, batch, counted), 0.0)
    else:
        advantage = reward - _mean(reward, group, counted)
        if baseline == "others":  # the distance to the mean of the others, which is n / (n - 1) times that to the mean
            count = np.bincount(group, counted)[group]
            advantage = advantage * (count / np.maximum(count - 1, 1))
        advantage = np.where(_differs(reward, group, counted), advantage, 0.0)
    if scale == "group":
        advantage = advantage / (_deviation(reward, group, counted) + epsilon)
    elif scale == "batch" and baseline == "others":
        # A group of one has no advantage, rather than one of 0.
        compared = counted & (np.bincount(group, counted)[group] > 1)
        advantage = np.where(compared, advantage - _mean(advantage, batch, compared), 0.0)
        advantage = advantage / (_deviation(advantage, batch, compared) + epsilon)
    elif scale == "batch":
        advantage = advantage / (_deviation(reward, batch, counted) + epsilon)
    values = np.where(counted, advantage, 0.0)
    has_signal = np.bincount(group, values != 0, minlength=len(names)) > 0
    return AnswerAdvantages(values.astype(rewards.dtype), has_signal)


def check_advantage_settings(baseline: str, scale: str) -> None:
    """Check that a baseline and a scale go together.

    Raises:
        RecipeError: They don't, or one is unknown.
    """
    if baseline not in _SCALES:
        raise RecipeError(f"baseline={baseline!r}: {suggest_name(baseline, _SCALES)}")
    if scale not in get_args(Scale):
        raise RecipeError(f"scale={scale!r}: {suggest_name(scale, get_args(Scale))}")
    if scale not in _SCALES[baseline]:
        raise RecipeError(
            f"scale={scale!r} with baseline={baseline!r} divides equal rewards by epsilon alone; use scale in "
            f"{{{', '.join(map(repr, _SCALES[baseline]))}}}, or baseline='group'"
        )


def _mean(values: np.ndarray, group: np.ndarray, counted: np.ndarray) -> np.ndarray:
    """Return the mean of the counted values of each answer's group; 0 if there are none."""
    count = np.bincount(group, counted)
    return (np.bincount(group, np.where(counted, values, 0.0)) / np.maximum(count, 1))[group]


def _deviation(values: np.ndarray, group: np.ndarray, counted: np.ndarray) -> np.ndarray:
    """Return the standard deviation of the counted values of each answer's group, with Bessel's correction; 0 for
    fewer than two."""
    square = np.where(counted, values - _mean(values, group, counted), 0.0) ** 2
    count = np.bincount(group, counted)
    return np.sqrt(np.bincount(group, square) / np.maximum(count - 1, 1))[group]


def _differs(values: np.ndarray, group: np.ndarray, counted: np.ndarray) -> np.ndarray:
    """Return for each answer whether two counted values of its group differ."""
    low, high = np.full(group.max(initial=-1) + 1, np.inf), np.full(group.max(initial=-1) + 1, -np.inf)
    np.minimum.at(low, group[counted], values[counted])
    np.maximum.at(high, group[counted], values[counted])
    return (low < high)[group]
