"""`Kto`: learn from answers that are each labeled good or bad, without pairs (KTO)."""

import dataclasses
from collections.abc import Mapping
from typing import ClassVar

import jax
import jax.numpy as jnp
from jax.nn import sigmoid
from jaxtyping import Array, Float

from ...core import Axes, Batch, Loss, Mean, Sum
from ...core.batch_checks import MASK_LEAF, LeafRange
from ...core.errors import RecipeError
from ...core.measures import Losses, Metrics
from ...core.validation import Validated
from ...spmd import psum_over_tokens
from .objective import DecoderObjective, VocabularyHead
from .pair_checks import check_pairs, count_chosen_starts, mark_chosen
from .preference import REFERENCE_LEAF, REFERENCE_RANGE
from .segment_totals import find_slots, sum_own_positions, sum_segments

LABEL_LEAF = "desirable"
"""Leaf with 1 for the positions of good answers, and 0 for those of bad ones."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Kto(Validated, DecoderObjective):
    """Raise the probability of good answers and lower that of bad ones, compared with a reference model.

    The segments 2k-1 and 2k of a row are an answer, and the answer to another prompt after the same prompt: over all rows of
    the global batch, the latter estimate the divergence from the reference, at which the losses are centered. Since it is a
    mean over the batch, micro-batches and pipelines are errors. The leaf `desirable` is 1 for good answers;
    `reference_log_probability` has the reference model's log-probability of each target.

    The loss is the mean over the answers of the global batch.

    Source: KTO (arXiv:2402.01306), equations 7 and 8, with the divergence of mismatched pairs in a batch.

    Attributes:
        beta: Strength of the bond to the reference model.
        desirable_weight: Weight of good answers.
        undesirable_weight: Weight of bad answers.
    """

    beta: float = 0.1
    desirable_weight: float = 1.0
    undesirable_weight: float = 1.0

    sums_over_rows: ClassVar[bool] = False
    reads_pairs: ClassVar[bool] = True

    def __post_init__(self) -> None:
        for name in ("beta", "desirable_weight", "undesirable_weight"):
            if not getattr(self, name) > 0.0:
                raise RecipeError(f"objective.{name}={getattr(self, name)}; expected a positive number")

    @property
    def required_leaves(self) -> frozenset[str]:  # pyright: ignore[reportIncompatibleVariableOverride]
        return DecoderObjective.required_leaves | {"segment", "position", *self.leaf_axes}

    @property
    def leaf_axes(self) -> Mapping[str, Axes]:  # pyright: ignore[reportIncompatibleVariableOverride]
        return dict.fromkeys((REFERENCE_LEAF, LABEL_LEAF), ("batch", "seq"))

    @property
    def leaf_ranges(self) -> Mapping[str, LeafRange]:
        label = LeafRange(0.0, 1.0, integral=True, advice="give 1 to good answers, and 0 to bad ones")
        return {REFERENCE_LEAF: REFERENCE_RANGE, LABEL_LEAF: label}

    def loss_weights(self, batch: Batch) -> Mapping[str, Float[Array, ""]]:
        return {"kto": count_chosen_starts(batch)}

    def targets(self, batch: Batch) -> Mapping[str, Array]:
        slots = find_slots(batch)
        return {
            **super().targets(batch),
            REFERENCE_LEAF: batch[REFERENCE_LEAF],
            LABEL_LEAF: batch[LABEL_LEAF].astype(jnp.float32),
            "slot": slots.slot,
            "starts": slots.starts,
            "stray": slots.stray,
            "answers": mark_chosen(batch),
        }

    def compute(self, head: VocabularyHead, targets: Mapping[str, Array], train: bool) -> tuple[Losses, Metrics]:
        mask, slot, starts = targets[MASK_LEAF], targets["slot"], targets["starts"]
        log_probability = head.log_probabilities(targets["targets"], mask)
        reference = jnp.where(mask != 0, targets[REFERENCE_LEAF], 0.0)
        values = [log_probability * mask, reference * mask, mask, starts, starts * targets[LABEL_LEAF]]
        sums = sum_segments(jnp.stack(values, axis=-1), slot).reshape(-1, 2, len(values))
        counted = sum_own_positions((starts * targets["answers"])[..., None], slot).reshape(-1, 2)[:, 0]
        ratio, good = sums[:, :, 0] - sums[:, :, 1], sums[:, 0, 4]
        weight = counted.sum()
        # Over the global batch, and a constant.
        total, count = psum_over_tokens((jax.lax.stop_gradient(ratio[:, 1] * counted).sum(), weight))
        divergence = jnp.maximum(total / jnp.maximum(count, 1.0), 0.0)
        gain = self.beta * (ratio[:, 0] - divergence)
        loss = self.desirable_weight * good * sigmoid(-gain) + self.undesirable_weight * (1.0 - good) * sigmoid(gain)
        losses = {"kto": Loss((loss * counted).sum(), weight)}
        faults = check_pairs(jax.lax.stop_gradient(sums[:, :, 2:4]), targets["stray"])
        metrics: Metrics = {"kl": Mean(divergence * weight, weight), "tokens": Sum(mask.sum())}
        for name, share in (("chosen", counted * good), ("rejected", counted * (1.0 - good))):
            metrics |= {
                f"rewards/{name}": Mean((self.beta * ratio[:, 0] * share).sum(), share.sum()),
                f"logps/{name}": Mean((sums[:, 0, 0] * share).sum(), share.sum()),
            }
        return losses, {**metrics, **faults}
