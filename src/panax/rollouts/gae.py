"""Generalized advantage estimation: an advantage for each action of an answer, from values of a value head."""

import dataclasses
import math
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
from jaxtyping import Float

from ..core.batch_checks import ADVANTAGE_LEAF, MASK_LEAF, OLD_LEAF, OLD_VALUE_LEAF, REFERENCE_LEAF, RETURN_LEAF
from ..core.errors import RecipeError
from ..core.validation import Validated


@dataclasses.dataclass(frozen=True, kw_only=True)
class Gae(Validated):
    """Advantages of actions from the values of the model's value head (PPO), in place of comparing answers.

    An answer's reward belongs to its last action. The model's objective is `PolicyGradient` with a `value_weight`.

    Sources: GAE (arXiv:1506.02438), equation 16; PPO (arXiv:1707.06347); for answers, with the divergence in the reward,
    InstructGPT (arXiv:2203.02155), equation 2.

    Attributes:
        gamma: Discount of each further action.
        lam: Weight of later errors of the values: 0 trusts the next value, 1 the reward alone.
        whiten: Subtract the mean of a rollout's advantages, and divide by their standard deviation.
        kl_in_reward: Weight of the divergence from the reference model, the one with which the run began: each action's
            reward loses that times the difference of its log-probabilities, in nats.

    >>> Gae(lam=0.9).gamma
    1.0
    """

    gamma: float = 1.0
    lam: float = 0.95
    whiten: bool = True
    kl_in_reward: float = 0.0

    def __post_init__(self) -> None:
        for name in ("gamma", "lam"):
            if not 0.0 <= getattr(self, name) <= 1.0:
                raise RecipeError(f"data.gae.{name}={getattr(self, name):g}; expected a number from 0 to 1")
        if not 0.0 <= self.kl_in_reward < math.inf:
            raise RecipeError(f"data.gae.kl_in_reward={self.kl_in_reward:g}; expected 0 or more")


class ActionAdvantages(NamedTuple):
    """Of each action, 0 elsewhere.

    Attributes:
        advantages: Advantages.
        returns: Returns, which the values are to estimate: advantages before whitening, plus values.
    """

    advantages: Float[np.ndarray, "rows length"]
    returns: Float[np.ndarray, "rows length"]


def estimate_advantages(
    settings: Gae,
    rewards: Float[np.ndarray, " rows"],
    values: Float[np.ndarray, "rows length"],
    mask: Float[np.ndarray, "rows length"],
    log_ratio: Float[np.ndarray, "rows length"] | None = None,
) -> ActionAdvantages:
    """Estimate the advantage of each action of rows with one answer each, in float64.

    The value after an answer's last action is 0, whether the answer ended or was cut. Positions that are no actions, such as
    those of a tool's output between two parts of an answer, are skipped: the value after an action is that of the next action.

    Args:
        rewards: Reward of each row's answer; not read if it has no action.
        values: Value of each action, before it.
        mask: Other than 0 for actions.
        log_ratio: Log-probability of each action minus that by the reference model, in nats; needed with `kl_in_reward`.

    >>> values, mask = np.array([[0.5, 9.0, 0.25]]), np.array([[1.0, 0.0, 1.0]])
    >>> estimate_advantages(Gae(lam=0.5, whiten=False), np.array([1.0]), values, mask).advantages.tolist()
    [[0.125, 0.0, 0.75]]
    """
    counted = mask != 0
    values = values.astype(np.float64)
    of_action = np.zeros(values.shape, np.float64)
    if settings.kl_in_reward:
        assert log_ratio is not None
        of_action -= settings.kl_in_reward * np.where(counted, log_ratio, 0.0).astype(np.float64)
    with_actions = np.flatnonzero(counted.any(axis=1))
    last = values.shape[1] - 1 - counted[:, ::-1].argmax(axis=1)
    of_action[with_actions, last[with_actions]] += rewards[with_actions]
    advantages = np.zeros(values.shape, np.float64)
    following, estimate = np.zeros((2, len(values)), np.float64)
    for place in reversed(range(values.shape[1])):
        here, value = counted[:, place], np.where(counted[:, place], values[:, place], 0.0)
        error = of_action[:, place] + settings.gamma * following - value
        estimate = np.where(here, error + settings.gamma * settings.lam * estimate, estimate)
        following = np.where(here, value, following)
        advantages[:, place] = np.where(here, estimate, 0.0)
    returns = np.where(counted, advantages + values, 0.0)
    if settings.whiten and counted.any():
        chosen = advantages[counted]
        advantages = np.where(counted, (advantages - chosen.mean()) / (chosen.std() + 1e-8), 0.0)
    return ActionAdvantages(advantages, returns)


def explained_variance(
    values: Float[np.ndarray, "rows length"],
    returns: Float[np.ndarray, "rows length"],
    mask: Float[np.ndarray, "rows length"],
) -> float:
    """Return the share of the returns' variance that values explain: 1 for exact values, 0 for a constant; NaN if the returns
    don't differ.

    >>> row = np.array([[1.0, 2.0, 3.0]])
    >>> explained_variance(row, row, np.ones((1, 3)))
    1.0
    """
    counted = mask != 0
    chosen = returns[counted].astype(np.float64)
    variance = chosen.var() if chosen.size else 0.0
    return 1.0 - float((chosen - values[counted]).var() / variance) if variance > 0.0 else math.nan


def add_value_advantages(
    settings: Gae | None, leaves: Mapping[str, np.ndarray], rewards: Float[np.ndarray, " rows"]
) -> tuple[dict[str, np.ndarray], dict[str, float]]:
    """Return a batch with the advantages of its actions and their returns, and figures to log; as it is without settings.

    Args:
        leaves: Leaves of a batch, with the values of actions, and with `kl_in_reward` the log-probabilities by the trainer
            and by the reference model.
        rewards: Reward of each row's answer; NaN for one that is left out.
    """
    if settings is None:
        return dict(leaves), {}
    values, mask = leaves[OLD_VALUE_LEAF], leaves[MASK_LEAF]
    log_ratio, figures = None, {}
    if settings.kl_in_reward:
        log_ratio = leaves[OLD_LEAF] - leaves[REFERENCE_LEAF]
        figures["kl"] = float(log_ratio[mask != 0].mean()) if mask.any() else 0.0
    result = estimate_advantages(settings, rewards, values, mask, log_ratio)
    explained = explained_variance(values, result.returns, mask)
    if not math.isnan(explained):
        figures["explained_variance"] = explained
    made = {ADVANTAGE_LEAF: result.advantages, RETURN_LEAF: result.returns}
    return {**leaves, **{name: leaf.astype(np.float32) for name, leaf in made.items()}}, figures
