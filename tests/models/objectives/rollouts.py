"""Batches of a rollout's answers: packed, of uneven lengths, with one excluded answer and one of a single action."""

from typing import Any

import numpy as np
import pairs

from panax.models.objectives.policy_gradient import ADVANTAGE_LEAF, BEHAVIOR_LEAF, OLD_LEAF
from panax.models.objectives.preference import REFERENCE_LEAF

EXCLUDED = (1, 2)
"""Row and segment of the answer without actions."""


def batch(*leaves: str, seed: int = 0, length: int = pairs.LENGTH) -> dict[str, np.ndarray]:
    """Rows of answers; log-probabilities are near those of a model that knows nothing.

    Args:
        leaves: Those besides advantages and behavior log-probabilities.
    """
    made = pairs.lay(pairs.random_answers(seed), length)
    rng = np.random.default_rng(seed + 1)
    row, segment = EXCLUDED
    made["loss_mask"][row][made["segment"][row] == segment] = 0.0
    advantages = rng.normal(size=(*made["segment"].shape[:1], made["segment"].max() + 1)).astype(np.float32)
    # A group without signal.
    advantages[0] = 0.0
    made[ADVANTAGE_LEAF] = np.take_along_axis(advantages, made["segment"], axis=1)
    for name in (BEHAVIOR_LEAF, OLD_LEAF, REFERENCE_LEAF):
        of_answers = np.take_along_axis(rng.uniform(-0.5, 0.3, advantages.shape), made["segment"], axis=1)
        drawn = -np.log(pairs.MODEL.vocab_size) + of_answers + rng.uniform(-0.4, 0.4, made["tokens"].shape)
        # What is stored where nothing was sampled is of no consequence.
        made[name] = np.where(made["loss_mask"] > 0, drawn, 7.0).astype(np.float32)
    others = {OLD_LEAF, REFERENCE_LEAF} - set(leaves)
    return {name: leaf for name, leaf in made.items() if name not in others}


def batch_for(objective: Any, **settings: Any) -> dict[str, np.ndarray]:
    """Rows with the leaves that an objective reads."""
    return batch(*objective.leaf_axes, **settings)
