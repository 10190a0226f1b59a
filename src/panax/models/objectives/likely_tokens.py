"""`LikelyTokensOf`: no objective to train, but the most likely tokens of each position, as metrics of evaluations."""

import dataclasses
from collections.abc import Mapping

import jax.numpy as jnp
from jaxtyping import Array

from ...core import Loss, Sum
from ...core.batch_checks import MASK_LEAF
from ...core.measures import Losses, Metrics
from ...core.task import LOG_PROBABILITIES, TOP_LOG_PROBABILITIES, TOP_TOKENS
from ...layers import find_likely_tokens
from .log_probabilities import PositionEvaluation
from .objective import VocabularyHead


@dataclasses.dataclass(frozen=True, kw_only=True)
class LikelyTokensOf(PositionEvaluation):
    """Evaluate a teacher: the most likely tokens of a batch's positions.

    Attributes:
        top_k: Number of tokens of each position.
        temperature: Divisor of the logits.
    """

    top_k: int
    temperature: float

    def compute(self, head: VocabularyHead, targets: Mapping[str, Array], train: bool) -> tuple[Losses, Metrics]:
        mask = targets[MASK_LEAF]
        likely = find_likely_tokens(head.hidden, head.table, self.top_k, head.settings, temperature=self.temperature)
        metrics: dict[str, Sum] = {}
        for name, values in ((TOP_TOKENS, likely.ids), (TOP_LOG_PROBABILITIES, likely.log_probabilities)):
            counted = jnp.where(mask[..., None] != 0, values, jnp.zeros((), values.dtype))
            metrics[name] = self.spread(counted, targets["place"])
        values = head.log_probabilities(targets["targets"], mask, temperature=self.temperature)
        metrics[LOG_PROBABILITIES] = self.spread(values, targets["place"])
        return {"cross_entropy": Loss(-(values * mask).sum(), mask.sum())}, metrics
