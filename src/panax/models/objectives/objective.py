"""`DecoderObjective`: the losses and metrics of a decoder's hidden states, as a value of its task.

The task does everything else: the model, meshes, pipelines, micro-batches, adapters and checkpoints. An objective
is a list of terms, each a sum with its own weight over the global batch, so that packing, sharding and uneven
micro-batches change nothing.
"""

import abc
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, ClassVar, NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from ...core import Axes, Batch
from ...core.batch_checks import KEPT_COUNT_LEAF, KEPT_LEAF, MASK_LEAF, LeafRange
from ...core.measures import Losses, Metrics
from ...core.monitors import MetricMonitor
from ...core.task import RolloutNeeds
from ...kernels import CrossEntropySettings
from ...kernels.attention.mask import MASKED
from ...kernels.kept_tokens import kept_log_softmax
from ...layers import TokenLoss, TokenTops, TopTokens, token_log_probabilities, token_loss, token_top_log_probabilities
from ..value_head import ValueHead

EXPERTS_AXES: Axes = ("batch", "seq", None, None)

KEPT_AXES: Mapping[str, Axes] = {KEPT_LEAF: ("batch", "seq", "candidate"), KEPT_COUNT_LEAF: ("batch", "seq")}


class KeptTokens(NamedTuple):
    """The tokens among which each target was drawn.

    Attributes:
        ids: Distinct ids.
        size: The first `size` of them were kept.
    """

    ids: Int[Array, "batch seq candidate"]
    size: Int[Array, "batch seq"]


class VocabularyHead(NamedTuple):
    """The final hidden states of a (micro-)batch, and the table that gives their logits.

    In a pipeline these are a stage's share of all positions, as one row.

    Attributes:
        hidden: Normalized hidden states.
        table: The output table, a parameter with the axes `vocab embed`.
        settings: The soft-cap and the vocabulary, with the task's z-loss and label smoothing in training.
        vocab_size: Number of tokens, without padding.
        value_head: Head of the values of actions, for objectives that train them.
    """

    hidden: Float[Array, "batch residual embed"]
    table: Any
    settings: CrossEntropySettings
    vocab_size: int
    value_head: ValueHead | None = None

    def token_loss(self, targets: Int[Array, "batch seq"], mask: Float[Array, "batch seq"]) -> TokenLoss:
        """Compute the cross-entropy, summed over targets by the mask."""
        return token_loss(self.hidden, self.table, targets, mask, self.settings)

    def log_probabilities(
        self, targets: Int[Array, "batch seq"], mask: Float[Array, "batch seq"], *, temperature: float = 1.0
    ) -> Float[Array, "batch seq"]:
        """Compute the log-probability of each target; 0 if its mask is 0.

        Args:
            temperature: Divisor of the logits, after a soft-cap.
        """
        if temperature == 1.0:
            return token_log_probabilities(self.hidden, self.table, targets, mask, self.settings)
        return self.top_log_probabilities(targets[..., None], targets, mask, temperature=temperature).top[..., 0]

    def top_log_probabilities(
        self,
        ids: Int[Array, "batch seq k"],
        targets: Int[Array, "batch seq"],
        mask: Float[Array, "batch seq"],
        *,
        temperature: float,
    ) -> TokenTops:
        """Compute the log-probabilities of distinct ids and of all others, with logits divided by the temperature, and that of
        each target; 0 if its mask is 0.
        """
        given = TopTokens(ids, targets, mask)
        return token_top_log_probabilities(self.hidden, self.table, given, self.settings, temperature=temperature)

    def kept_log_probabilities(
        self,
        kept: KeptTokens,
        targets: Int[Array, "batch seq"],
        mask: Float[Array, "batch seq"],
        *,
        temperature: float,
    ) -> Float[Array, "batch seq"]:
        """Compute the log-probability of each target among the tokens that its sampler kept; 0 if its mask is 0.

        A target that is not among them has -1e30.
        """
        among_all = self.top_log_probabilities(kept.ids, targets, mask, temperature=temperature).top
        among_kept = kept_log_softmax(among_all, jnp.maximum(kept.size, 1))
        chosen = jnp.where(kept.ids == targets[..., None], among_kept, MASKED).max(axis=-1)
        return jnp.where(mask != 0, chosen, 0.0)

    def values(self) -> Float[Array, "batch seq"]:
        """Compute the value of each position, in float32."""
        assert self.value_head is not None
        return self.value_head(self.hidden)


def target_log_probabilities(
    head: VocabularyHead, targets: Mapping[str, Array], temperature: float
) -> Float[Array, "batch seq"]:
    """Compute the log-probability of each target; among the tokens that its sampler kept, if these are given."""
    ids, mask = targets["targets"], targets[MASK_LEAF]
    if KEPT_LEAF not in targets:
        return head.log_probabilities(ids, mask, temperature=temperature)
    kept = KeptTokens(targets[KEPT_LEAF], targets[KEPT_COUNT_LEAF])
    return head.kept_log_probabilities(kept, ids, mask, temperature=temperature)


class DecoderObjective(abc.ABC):
    """Base of objectives: frozen dataclasses without arrays.

    Attributes:
        required_leaves: Leaves that a batch must have.
        leaf_axes: Logical axes of leaves that other objectives don't read.
        id_leaves: Those of them that hold ids of the vocabulary, wherever a target has loss.
        reads_cross_entropy_terms: True if the task's `z_loss` and `label_smoothing` have an effect.
        reads_pairs: True if each two adjacent segments of a row belong together; data of pairs is refused otherwise.
        sums_over_rows: False if the loss changes when a batch is processed in parts; micro-batches are then an error.
    """

    required_leaves: frozenset[str] = frozenset({"tokens", "targets", MASK_LEAF})
    leaf_axes: Mapping[str, Axes] = MappingProxyType({})
    id_leaves: frozenset[str] = frozenset()
    reads_cross_entropy_terms: ClassVar[bool] = False
    sums_over_rows: ClassVar[bool] = True
    reads_pairs: ClassVar[bool] = False

    @property
    def teacher_temperature(self) -> float | None:
        """Return the temperature of a teacher's log-probabilities in the batch; None if it reads none."""
        return None

    @property
    def replays_experts(self) -> bool:
        """Return True if batches hold the experts that answers were drawn with, to use them again."""
        return False

    @property
    def estimates_values(self) -> bool:
        """Return True if the decoder has a value head."""
        return False

    @property
    def rollout_needs(self) -> RolloutNeeds | None:
        """Return the requirements of an objective that learns from rollouts; None for others."""
        return None

    @property
    def leaf_ranges(self) -> Mapping[str, LeafRange]:
        """Return the values that the leaves of `leaf_axes` may hold."""
        return {}

    @property
    def leaf_advice(self) -> Mapping[str, str]:
        """Return how to get a leaf that a batch lacks, for messages."""
        return {}

    def create_monitor(self) -> MetricMonitor | None:
        """Return what follows the metrics of each step, and may warn; None for nothing."""
        return None

    @abc.abstractmethod
    def loss_weights(self, batch: Batch) -> Mapping[str, Float[Array, ""]]:
        """Return each loss's weight, summed over this device's part of a batch, or of all micro-batches."""

    def targets(self, batch: Batch) -> Mapping[str, Array]:
        """Return what `compute` reads of a batch: leaves with one value, or vector, per position, 0 for padding."""
        return {name: batch[name] for name in ("targets", MASK_LEAF)}

    @abc.abstractmethod
    def compute(self, head: VocabularyHead, targets: Mapping[str, Array], train: bool) -> tuple[Losses, Metrics]:
        """Compute losses and metrics of this device's positions, as sums."""
