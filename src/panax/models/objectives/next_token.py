"""`NextToken`: cross-entropy of each target that the mask counts."""

import dataclasses
from collections.abc import Mapping
from typing import ClassVar

from jaxtyping import Array, Float

from ...core import Batch, Loss, Mean, Sum
from ...core.batch_checks import MASK_LEAF
from ...core.measures import Losses, Metrics
from .objective import DecoderObjective, VocabularyHead


@dataclasses.dataclass(frozen=True)
class NextToken(DecoderObjective):
    """Predict each next token: pretraining, and supervised fine-tuning with a mask of answers."""

    reads_cross_entropy_terms: ClassVar[bool] = True

    def loss_weights(self, batch: Batch) -> Mapping[str, Float[Array, ""]]:
        return {"cross_entropy": batch[MASK_LEAF].sum()}

    def compute(self, head: VocabularyHead, targets: Mapping[str, Array], train: bool) -> tuple[Losses, Metrics]:
        mask = targets[MASK_LEAF]
        sums = head.token_loss(targets["targets"], mask)
        weight = mask.sum()
        losses = {"cross_entropy": Loss(sums.loss, weight)}
        return losses, {"accuracy": Mean(sums.correct, weight), "tokens": Sum(weight)}
