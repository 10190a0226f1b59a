"""Reinforcement-learning agents; each is a `panax.core.CollectingTask`, trained by the same step and loop as
other tasks.
"""

from .advantages import Advantages, gae
from .agent import Agent
from .distributions import Categorical, DiagonalGaussian, Distribution, SquashedGaussian, make_distribution
from .dqn import Dqn
from .episodes import Episodes, FinishedEpisodes, evaluation_result, run_episodes
from .film import Film
from .policies import DecoderPolicy, PerceptronPolicy, Policy, PolicyOutput, RecurrentPolicy
from .ppo import Ppo
from .replay import Experience, Replay
from .sac import Sac
from .seeds import Seeds
from .statistics import Statistics

__all__ = [
    "Advantages", "Agent", "Categorical", "DecoderPolicy", "DiagonalGaussian", "Distribution", "Dqn", "Episodes",
    "Experience", "Film", "FinishedEpisodes", "PerceptronPolicy", "Policy", "PolicyOutput", "Ppo", "RecurrentPolicy",
    "Replay", "Sac", "Seeds", "SquashedGaussian", "Statistics", "evaluation_result", "gae", "make_distribution",
    "run_episodes",
]  # fmt: skip
