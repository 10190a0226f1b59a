"""Rollouts for reinforcement learning of language models: rewards of answers, and the advantages that a policy
gradient is weighted with."""

from typing import TYPE_CHECKING

from ..core.lazy import lazy_getattr

if TYPE_CHECKING:
    from .advantages import AnswerAdvantages, compute_advantages
    from .rewards.pool import RewardPool
    from .rewards.reward import Reward, Verdict

__getattr__ = lazy_getattr(
    __name__,
    {
        "advantages": ("AnswerAdvantages", "compute_advantages"),
        "rewards.pool": ("RewardPool",),
        "rewards.reward": ("Reward", "Verdict"),
    },
)

__all__ = ["AnswerAdvantages", "Reward", "RewardPool", "Verdict", "compute_advantages"]
