"""No objectives to train, but values of each position as metrics of evaluations: `TargetLogProbabilities`."""

import dataclasses
from collections.abc import Mapping
from typing import ClassVar

import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Shaped

from ...core import Axes, Batch, Loss, Sum
from ...core.batch_checks import KEPT_LEAF, MASK_LEAF
from ...core.layout.layout import axis_size
from ...core.measures import Losses, Metrics
from ...core.task import LOG_PROBABILITIES, VALUES
from ...parallel.context import sequence_positions
from ...spmd import ValueState, assert_sharding, token_axes
from .objective import KEPT_AXES, DecoderObjective, VocabularyHead, target_log_probabilities


@dataclasses.dataclass(frozen=True, kw_only=True)
class PositionEvaluation(DecoderObjective):
    """Base of evaluations with values for each position of the global batch, on any mesh; the loss is the cross-entropy.

    Attributes:
        rows: Rows of the global batch.
        length: Positions of a row, over all devices.
    """

    rows: int
    length: int

    def loss_weights(self, batch: Batch) -> Mapping[str, Float[Array, ""]]:
        return {"cross_entropy": batch[MASK_LEAF].sum()}

    def targets(self, batch: Batch) -> Mapping[str, Array]:
        place = sequence_positions(batch["targets"].shape[1], context=axis_size("context"))
        return {**super().targets(batch), "place": batch["row"][:, None] * self.length + place[None]}

    def spread(self, values: Shaped[Array, "batch seq *more"], place: Int[Array, "batch seq"]) -> Sum:
        """Return values of this device's positions as a sum over devices: zeros for the positions of the others."""
        more = values.shape[2:]
        spread = jnp.zeros((self.rows * self.length, *more), values.dtype)
        spread = spread.at[place.reshape(-1)].add(values.reshape(-1, *more))
        spread = assert_sharding(spread, dict.fromkeys(token_axes(), ValueState.PARTIAL))
        return Sum(spread.reshape(self.rows, self.length, *more))


@dataclasses.dataclass(frozen=True, kw_only=True)
class TargetLogProbabilities(PositionEvaluation):
    """Evaluate the log-probability of each target of a batch.

    Attributes:
        temperature: Divisor of the logits; the loss is the cross-entropy at it.
        values: True if the decoder has a value head, to evaluate its values too.
        kept: True for log-probabilities among the tokens that the sampler kept, which come with the batch.
    """

    temperature: float = 1.0
    values: bool = False
    kept: bool = False

    reads_pairs: ClassVar[bool] = True

    @property
    def estimates_values(self) -> bool:
        return self.values

    @property
    def required_leaves(self) -> frozenset[str]:  # pyright: ignore[reportIncompatibleVariableOverride]
        return DecoderObjective.required_leaves | set(self.leaf_axes)

    @property
    def leaf_axes(self) -> Mapping[str, Axes]:  # pyright: ignore[reportIncompatibleVariableOverride]
        return KEPT_AXES if self.kept else {}

    @property
    def id_leaves(self) -> frozenset[str]:  # pyright: ignore[reportIncompatibleVariableOverride]
        return frozenset({KEPT_LEAF}) if self.kept else frozenset()

    def targets(self, batch: Batch) -> Mapping[str, Array]:
        return {**super().targets(batch), **{name: batch[name] for name in self.leaf_axes}}

    def compute(self, head: VocabularyHead, targets: Mapping[str, Array], train: bool) -> tuple[Losses, Metrics]:
        values, mask = target_log_probabilities(head, targets, self.temperature), targets[MASK_LEAF]
        losses = {"cross_entropy": Loss(-(values * mask).sum(), mask.sum())}
        metrics = {LOG_PROBABILITIES: self.spread(values, targets["place"])}
        if self.values:
            metrics[VALUES] = self.spread(jnp.where(mask != 0, head.values(), 0.0), targets["place"])
        return losses, metrics
