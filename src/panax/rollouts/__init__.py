"""Rollouts for reinforcement learning of language models: rewards of answers, and the advantages that a policy
gradient is weighted with."""

from typing import TYPE_CHECKING

from ..core.lazy import lazy_getattr

if TYPE_CHECKING:
    from .advantages import AnswerAdvantages, compute_advantages
    from .environments.reasoning_gym_prompts import ReasoningGym
    from .rewards.json_answer import json_answer
    from .rewards.pool import RewardPool
    from .rewards.reward import Reward, Verdict
    from .rewards.stock import matches, number_equals, text_equals

__getattr__ = lazy_getattr(
    __name__,
    {
        "advantages": ("AnswerAdvantages", "compute_advantages"),
        "environments.reasoning_gym_prompts": ("ReasoningGym",),
        "rewards.json_answer": ("json_answer",),
        "rewards.pool": ("RewardPool",),
        "rewards.reward": ("Reward", "Verdict"),
        "rewards.stock": ("matches", "number_equals", "text_equals"),
    },
)

__all__ = [
    "AnswerAdvantages", "ReasoningGym", "Reward", "RewardPool", "Verdict", "compute_advantages", "json_answer", "matches",
    "number_equals", "text_equals",
]  # fmt: skip
