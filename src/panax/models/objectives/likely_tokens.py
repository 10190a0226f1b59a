"""`LikelyTokensOf`: no objective to train, but the most likely tokens of each position, as metrics of evaluations."""

import dataclasses
from collections.abc import Mapping

import jax.numpy as jnp
from jaxtyping import Array, Float

from ...core import Batch, Loss, Sum
from ...core.batch_checks import MASK_LEAF
from ...core.layout.layout import axis_size
from ...core.measures import Losses, Metrics
from ...core.task import TOP_LOG_PROBABILITIES, TOP_TOKENS
from ...layers import find_likely_tokens
from ...parallel.context import sequence_positions
from ...spmd import ValueState, assert_sharding, token_axes
from .objective import DecoderObjective, VocabularyHead


@dataclasses.dataclass(frozen=True, kw_only=True)
class LikelyTokensOf(DecoderObjective):
    """Evaluate a teacher: the most likely tokens of a batch's positions, on any mesh; its loss is the cross-entropy.

    Attributes:
        rows: Rows of the global batch.
        length: Positions of a row, over all devices.
        top_k: Number of tokens of each position.
        temperature: Divisor of the logits.
    """

    rows: int
    length: int
    top_k: int
    temperature: float

    def loss_weights(self, batch: Batch) -> Mapping[str, Float[Array, ""]]:
        return {"cross_entropy": batch[MASK_LEAF].sum()}

    def targets(self, batch: Batch) -> Mapping[str, Array]:
        place = sequence_positions(batch["targets"].shape[1], context=axis_size("context"))
        return {**super().targets(batch), "place": batch["row"][:, None] * self.length + place[None]}

    def compute(self, head: VocabularyHead, targets: Mapping[str, Array], train: bool) -> tuple[Losses, Metrics]:
        mask, place = targets[MASK_LEAF], targets["place"].reshape(-1)
        likely = find_likely_tokens(head.hidden, head.table, self.top_k, head.settings, temperature=self.temperature)
        metrics: dict[str, Sum] = {}
        for name, values in ((TOP_TOKENS, likely.ids), (TOP_LOG_PROBABILITIES, likely.log_probabilities)):
            counted = jnp.where(mask[..., None] != 0, values, jnp.zeros((), values.dtype))
            # Each device's positions, and zeros for the others'.
            spread = jnp.zeros((self.rows * self.length, self.top_k), values.dtype)
            spread = spread.at[place].add(counted.reshape(-1, self.top_k))
            spread = assert_sharding(spread, dict.fromkeys(token_axes(), ValueState.PARTIAL))
            metrics[name] = Sum(spread.reshape(self.rows, self.length, self.top_k))
        sums = head.token_loss(targets["targets"], mask)
        return {"cross_entropy": Loss(sums.loss, mask.sum())}, metrics
