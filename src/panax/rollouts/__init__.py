"""Rollouts for reinforcement learning of language models: answers that a model draws to prompts, their rewards, and the
advantages by which it learns from them."""

from typing import TYPE_CHECKING

from ..core.lazy import lazy_getattr

if TYPE_CHECKING:
    from .advantages import AnswerAdvantages, compute_advantages
    from .environments.reasoning_gym_prompts import ReasoningGym
    from .environments.text_environment import TextEnvironment
    from .environments.tool_environment import ToolEnvironment
    from .environments.turns import Reply
    from .gae import Gae
    from .prompts import PromptFiles
    from .rewards.json_answer import json_answer
    from .rewards.pool import RewardPool
    from .rewards.reward import Reward, Verdict
    from .rewards.reward_model import RewardModel
    from .rewards.stock import matches, number_equals, text_equals
    from .rollout_data import RolloutData
    from .teacher import Teacher

__getattr__ = lazy_getattr(
    __name__,
    {
        "advantages": ("AnswerAdvantages", "compute_advantages"),
        "gae": ("Gae",),
        "prompts": ("PromptFiles",),
        "environments.text_environment": ("TextEnvironment",),
        "environments.reasoning_gym_prompts": ("ReasoningGym",),
        "environments.tool_environment": ("ToolEnvironment",),
        "environments.turns": ("Reply",),
        "rewards.json_answer": ("json_answer",),
        "rewards.pool": ("RewardPool",),
        "rewards.reward": ("Reward", "Verdict"),
        "rewards.reward_model": ("RewardModel",),
        "rewards.stock": ("matches", "number_equals", "text_equals"),
        "rollout_data": ("RolloutData",),
        "teacher": ("Teacher",),
    },
)

__all__ = [
    "AnswerAdvantages", "Gae", "PromptFiles", "ReasoningGym", "Reply", "Reward", "RewardModel", "RewardPool", "RolloutData",
    "Teacher", "TextEnvironment", "ToolEnvironment", "Verdict", "compute_advantages", "json_answer", "matches", "number_equals",
    "text_equals",
]  # fmt: skip
