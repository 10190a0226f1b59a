"""`TargetLogProbabilities`: no objective to train, but each target's log-probability, as a metric of evaluations."""

import dataclasses
from collections.abc import Mapping
from typing import ClassVar

import jax.numpy as jnp
from jaxtyping import Array, Float

from ...core import Batch, Loss, Sum
from ...core.batch_checks import MASK_LEAF
from ...core.layout.layout import axis_size
from ...core.measures import Losses, Metrics
from ...core.task import LOG_PROBABILITIES
from ...parallel.context import sequence_positions
from ...spmd import ValueState, assert_sharding, token_axes
from .objective import DecoderObjective, VocabularyHead


@dataclasses.dataclass(frozen=True, kw_only=True)
class TargetLogProbabilities(DecoderObjective):
    """Evaluate the log-probability of each target of a batch, on any mesh; its loss is the cross-entropy.

    Attributes:
        rows: Rows of the global batch.
        length: Positions of a row, over all devices.
    """

    reads_pairs: ClassVar[bool] = True

    rows: int
    length: int

    def loss_weights(self, batch: Batch) -> Mapping[str, Float[Array, ""]]:
        return {"cross_entropy": batch[MASK_LEAF].sum()}

    def targets(self, batch: Batch) -> Mapping[str, Array]:
        place = sequence_positions(batch["targets"].shape[1], context=axis_size("context"))
        return {**super().targets(batch), "place": batch["row"][:, None] * self.length + place[None]}

    def compute(self, head: VocabularyHead, targets: Mapping[str, Array], train: bool) -> tuple[Losses, Metrics]:
        mask = targets[MASK_LEAF]
        values = head.log_probabilities(targets["targets"], mask)
        # Each device's positions, and zeros for the others'.
        spread = jnp.zeros(self.rows * self.length).at[targets["place"].reshape(-1)].add(values.reshape(-1))
        spread = assert_sharding(spread, dict.fromkeys(token_axes(), ValueState.PARTIAL))
        losses = {"cross_entropy": Loss(-(values * mask).sum(), mask.sum())}
        return losses, {LOG_PROBABILITIES: Sum(spread.reshape(self.rows, self.length))}
