"""`Distill`: learn a teacher's distribution of each next token, stored as its most likely tokens."""

import dataclasses
from collections.abc import Mapping

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from ...core import Axes, Batch, Loss, Mean, Sum
from ...core.batch_checks import MASK_LEAF, LeafRange
from ...core.errors import RecipeError
from ...core.measures import NO_FAULT, DataChecks, Losses, Metrics
from ...core.task import RolloutNeeds
from ...core.validation import Validated
from .objective import DecoderObjective, VocabularyHead
from .teacher_divergences import EventLogProbabilities, TeacherDivergence, teacher_divergence, teacher_events

TEACHER_TOKENS_LEAF = "teacher_tokens"
"""Leaf with the ids of the tokens that the teacher finds most likely, (batch, seq, candidate)."""

TEACHER_LEAF = "teacher_log_probabilities"
"""Leaf with the teacher's log-probability of each of them, at the objective's temperature."""

_AXES = ("batch", "seq", "candidate")
_LARGEST_SUM = 1.001
"""Probabilities that sum to more, beyond the rounding of stored values, are an error."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Distill(Validated, DecoderObjective):
    """Make the distribution of each next token like a teacher's.

    The teacher's k most likely tokens and their log-probabilities come with the batch: `panax.add_teacher` evaluates it
    once, and no second model is in memory. The probability that they leave to all other tokens is one more event, the tail,
    and the divergence is exact over these k + 1 events: how the tail is divided among its tokens is not learned. With
    k the vocabulary it is the divergence of the whole distributions.

    Targets may also be the model's own draws (`RolloutData(teacher=Teacher(top_k=...))`): the teacher then judges each rollout.

    The loss is the mean over the targets with loss of the global batch, weighted by `loss_mask`. It is not multiplied by
    the square of the temperature. With `label_weight`, the mean cross-entropy of the labels at temperature 1 is added.

    Sources: distillation (arXiv:1503.02531); of the divergences, in `teacher_divergences.py`.

    Attributes:
        divergence: forward_kl spreads over all tokens that the teacher gives probability, reverse_kl keeps to the
            teacher's most likely ones, js lies between.
        beta: Of js: weight of the teacher in the mixture that both are compared with. Towards 0 it is like forward_kl,
            towards 1 like reverse_kl.
        temperature: Divisor of the logits of both; the stored log-probabilities are those at this temperature.
        label_weight: Weight of the cross-entropy of the labels beside the divergence.
    """

    divergence: TeacherDivergence = "forward_kl"
    beta: float = 0.5
    temperature: float = 1.0
    label_weight: float = 0.0

    def __post_init__(self) -> None:
        if not self.temperature > 0.0:
            raise RecipeError(f"objective.temperature={self.temperature}; expected a positive number")
        if not 0.0 < self.beta < 1.0:
            raise RecipeError(
                f'objective.beta={self.beta}; expected a number between 0 and 1; its limits are divergence="forward_kl" and '
                f'"reverse_kl"'
            )
        if self.beta != 0.5 and self.divergence != "js":
            raise RecipeError(
                f"objective.beta={self.beta} has no effect with divergence={self.divergence!r}; remove it, or choose js"
            )
        if self.label_weight < 0.0:
            raise RecipeError(f"objective.label_weight={self.label_weight}; expected 0 or more")

    @property
    def required_leaves(self) -> frozenset[str]:  # pyright: ignore[reportIncompatibleVariableOverride]
        return DecoderObjective.required_leaves | set(self.leaf_axes)

    @property
    def leaf_axes(self) -> Mapping[str, Axes]:  # pyright: ignore[reportIncompatibleVariableOverride]
        return {TEACHER_TOKENS_LEAF: _AXES, TEACHER_LEAF: _AXES}

    @property
    def teacher_temperature(self) -> float | None:
        return self.temperature

    @property
    def rollout_needs(self) -> RolloutNeeds:
        return RolloutNeeds(self.temperature, teacher=True)

    @property
    def id_leaves(self) -> frozenset[str]:  # pyright: ignore[reportIncompatibleVariableOverride]
        return frozenset({TEACHER_TOKENS_LEAF})

    @property
    def leaf_ranges(self) -> Mapping[str, LeafRange]:
        advice = "give logarithms of probabilities, as panax.add_teacher computes them"
        return {TEACHER_LEAF: LeafRange(high=0.0, counted_by=MASK_LEAF, advice=advice)}

    @property
    def leaf_advice(self) -> Mapping[str, str]:
        advice = "call panax.add_teacher(experiment, teacher=...), which evaluates a teacher once"
        return dict.fromkeys(self.leaf_axes, advice)

    def loss_weights(self, batch: Batch) -> Mapping[str, Float[Array, ""]]:
        return dict.fromkeys(("distillation", "cross_entropy"), batch[MASK_LEAF].sum())

    def targets(self, batch: Batch) -> Mapping[str, Array]:
        return {**super().targets(batch), **{name: batch[name] for name in self.leaf_axes}}

    def compute(self, head: VocabularyHead, targets: Mapping[str, Array], train: bool) -> tuple[Losses, Metrics]:
        mask, ids = targets[MASK_LEAF], targets[TEACHER_TOKENS_LEAF]
        computed = head.top_log_probabilities(ids, targets["targets"], mask, temperature=self.temperature)
        counted = mask != 0
        # Where nothing is counted, both have values at which divergences and their derivatives are finite.
        stored = jnp.where(counted[..., None], targets[TEACHER_LEAF], -1.0)
        teacher = teacher_events(stored, vocab_size=head.vocab_size)
        model = EventLogProbabilities(
            *(jnp.where(_like(counted, leaf), leaf, -1.0) for leaf in (computed.top, computed.tail))
        )
        divergence = jnp.where(counted, teacher_divergence(teacher, model, self.divergence, self.beta), 0.0)
        weight = mask.sum()
        losses = {
            "distillation": Loss((divergence * mask).sum(), weight),
            "cross_entropy": Loss(-(computed.target * mask).sum(), weight, self.label_weight),
        }
        covered = jnp.where(counted, jnp.exp(stored).sum(axis=-1), 0.0)
        best = jnp.take_along_axis(ids, stored.argmax(axis=-1)[..., None], axis=-1)[..., 0]
        metrics: Metrics = {
            "teacher/coverage": Mean((covered * mask).sum(), weight),
            "teacher/accuracy": Mean(((best == targets["targets"]).astype(jnp.float32) * mask).sum(), weight),
            "tokens": Sum(weight),
            "teacher_faults": _check_sums(jax.lax.stop_gradient(covered)),
        }
        return losses, metrics


def _check_sums(covered: Float[Array, "batch seq"]) -> DataChecks:
    text = (
        f"the probabilities of a position's {TEACHER_TOKENS_LEAF} sum to more than 1, so they are not those of distinct tokens "
        f"of one distribution; store them with panax.add_teacher. Their sum: "
    )
    return DataChecks(jnp.where(covered > _LARGEST_SUM, covered, NO_FAULT).max()[None], (text,))


def _like(counted: Array, leaf: Array) -> Array:
    return counted.reshape(*counted.shape, *(1,) * (leaf.ndim - counted.ndim))
