"""`PolicyGradient`: raise the probability of a rollout's actions by their advantages (GRPO and its kin)."""

import dataclasses
import math
from collections.abc import Mapping
from typing import Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from ...core import Axes, Batch, Loss, Mean, Sum
from ...core.batch_checks import (
    ADVANTAGE_LEAF,
    BEHAVIOR_LEAF,
    EXPERTS_LEAF,
    KEPT_COUNT_LEAF,
    KEPT_LEAF,
    MASK_LEAF,
    OLD_LEAF,
    OLD_VALUE_LEAF,
    REFERENCE_LEAF,
    RETURN_LEAF,
    LeafRange,
)
from ...core.errors import RecipeError
from ...core.measures import NO_FAULT, DataChecks, Losses, Maximum, Metrics
from ...core.task import RolloutNeeds
from ...core.validation import Validated
from .answer_order import number_targets
from .objective import EXPERTS_AXES, KEPT_AXES, DecoderObjective, VocabularyHead, target_log_probabilities
from .policy_losses import (
    POLICY_LOSSES,
    ActionLoss,
    Actions,
    Correction,
    PolicyLoss,
    bound_exp,
    correct_sampling,
    estimate_divergence,
)
from .segment_totals import expand_sums, find_slots, sum_segments
from .value_losses import value_loss

_AXES = ("batch", "seq")
_ADVICE = (
    "it is the log-probability of a sampled action, 0 or less: pass the value that the engine, or a model, returned"
)
_LOG_PROBABILITY = LeafRange(high=0.0, counted_by=MASK_LEAF, advice=_ADVICE)
_DEFAULTS = {
    "clip_low": 0.2, "clip_high": 0.2, "two_sided_clip": None, "positive_temperature": 1.0, "negative_temperature": 1.05,
    "max_answer": 0,
}  # fmt: skip


@dataclasses.dataclass(frozen=True, kw_only=True)
class PolicyGradient(Validated, DecoderObjective):
    """Raise the probability of actions with a positive advantage, and lower that of others.

    An answer is a segment of a row. `loss_mask` is 1 for the targets that are its actions, the sampled end token among
    them, and 0 elsewhere. The leaves `advantage` and `behavior_log_probability` come with the batch, one value for each
    target; so do `old_log_probability` with `several_updates`, and `reference_log_probability` with a `kl_weight`. With
    `replay_experts`, `experts` has the experts of each position (batch, seq, mixture layer, active).

    Ratios, and so clips, compare the current log-probability with the old one. The behavior log-probability, under the
    distribution that was really sampled, is read by `correction` and by the reported gap alone.

    Each loss is a sum over the global batch, divided once, so that packing, meshes and micro-batches change nothing:

    - `grpo`: clipped ratios; the mean over answers of the mean over their actions (GRPO, arXiv:2402.03300). Answers with
      advantage 0 count in its denominator.
    - `bnpo`: clipped ratios; the mean over all actions. Those of answers with advantage 0 count in its denominator.
    - `dapo`: the same mean, over the global batch where TRL's `bnpo` is over each micro-batch: here both are equal (DAPO,
      arXiv:2503.14476). Actions of answers with advantage 0 count in its denominator.
    - `dr_grpo`: clipped ratios; the sum over actions, divided by the number of answers times `max_answer` (Dr. GRPO,
      arXiv:2503.20783). Answers with advantage 0 count in its denominator.
    - `cispo`: log-probabilities weighted by ratios of at most `clip_high`; the mean over all actions (CISPO,
      arXiv:2506.13585). Those of answers with advantage 0 count in its denominator.
    - `sapo`: softly gated ratios; the mean over answers of the mean over their actions (SAPO, arXiv:2511.20347). Answers
      with advantage 0 count in its denominator.
    - `luspo`: clipped ratios of answers; the mean over answers of the sum over their actions (LUSPO, arXiv:2602.05261).
      Answers with advantage 0 count in its denominator.

    An answer without any action, excluded by its mask, counts in none of them.

    Attributes:
        loss: The loss of an action, by TRL's names.
        ratio: token for a ratio of each action; sequence for one ratio of an answer, the geometric mean over its actions
            (GSPO, arXiv:2507.18071, with `loss="grpo"`).
        several_updates: True if a rollout is used for more than one update: the leaf `old_log_probability` is then read.
            Otherwise the current log-probability is the old one, as a constant: all ratios are 1.
        clip_low: Ratios below 1 - clip_low are clipped.
        clip_high: Ratios above 1 + clip_high are clipped; of cispo, the largest ratio, such as 5.
        two_sided_clip: Largest ratio of actions with negative advantage; None for no bound.
        positive_temperature: Temperature of sapo's gate for positive advantages.
        negative_temperature: Temperature of sapo's gate for others.
        max_answer: Largest number of actions that an answer may have: a factor of dr_grpo's denominator.
        kl_weight: Weight of the divergence from the reference model, with the same denominator.
        correction: Multiply each action's loss, without the divergence, by the ratio of its old to its behavior probability
            (token), or by that of its answer (sequence); ratios above the cap are lowered to it (truncate) or excluded (mask).
        correction_cap: Largest such ratio.
        temperature: Divisor of the logits, that of the sampler.
        replay_experts: Of a mixture of experts: use the experts that each token was drawn with, from the leaf `experts`, also
            if the router would choose others now. Their weights are of the router's current scores, so that it has gradients
            (arXiv:2510.11370).
        replay_sampling: Log-probabilities are those among the tokens that the sampler kept (top-k, top-p), from the leaves
            `kept_tokens` and `kept_count`: the distribution that an action was drawn from, by the current parameters
            (arXiv:2512.02556). So are those of a reference model and a teacher.
        value_weight: Weight of the loss of a value head, the mean over all actions of half of the squared error (PPO,
            arXiv:1707.06347). The decoder then has a value for each position, and `return` is read; 0 for no values.
        value_clip: Largest difference of a value from that before the first update, `old_value`, up to which its error counts
            (see `value_loss`); None for no bound.
    """

    loss: PolicyLoss = "dapo"
    ratio: Literal["token", "sequence"] = "token"
    several_updates: bool = False
    clip_low: float = 0.2
    clip_high: float = 0.2
    two_sided_clip: float | None = None
    positive_temperature: float = 1.0
    negative_temperature: float = 1.05
    max_answer: int = 0
    kl_weight: float = 0.0
    correction: Correction = "none"
    correction_cap: float = 3.0
    temperature: float = 1.0
    replay_experts: bool = False
    replay_sampling: bool = False
    value_weight: float = 0.0
    value_clip: float | None = 0.2

    def __post_init__(self) -> None:
        for name in ("temperature", "positive_temperature", "negative_temperature", "clip_high", "correction_cap"):
            if not getattr(self, name) > 0.0:
                raise RecipeError(f"objective.{name}={getattr(self, name)}; expected a positive number")
        for name, default in _DEFAULTS.items():
            if getattr(self, name) != default and name not in self._form.settings:
                raise RecipeError(
                    f"objective.{name}={getattr(self, name)!r} has no effect on the loss {self.loss}; remove it"
                )
        if not 0.0 < self.clip_low <= 1.0:
            raise RecipeError(f"objective.clip_low={self.clip_low}; expected a number above 0 and at most 1")
        if self.two_sided_clip is not None and not self.two_sided_clip > 1.0 + self.clip_high:
            raise RecipeError(
                f"objective.two_sided_clip={self.two_sided_clip}; expected a ratio above 1 + clip_high, {1.0 + self.clip_high:g}"
            )
        if self.loss == "cispo" and self.clip_high < 1.0:
            raise RecipeError(
                f"objective.clip_high={self.clip_high} is the largest ratio of the loss cispo; set 1 or more, such as 5"
            )
        if self.loss == "luspo" and self.ratio != "sequence":
            raise RecipeError('objective.loss="luspo" has one ratio for each answer; set ratio="sequence"')
        if self.loss == "dr_grpo" and self.max_answer < 1:
            raise RecipeError(
                f"objective.max_answer={self.max_answer}; the loss dr_grpo divides by it: set the largest number of tokens "
                f"that an answer may have"
            )
        if not 0.0 <= self.value_weight < math.inf:
            raise RecipeError(f"objective.value_weight={self.value_weight}; expected 0 or more")
        if self.value_clip is not None and not self.value_clip > 0.0:
            raise RecipeError(f"objective.value_clip={self.value_clip}; expected a positive number, or None")
        if self.value_clip != 0.2 and not self.value_weight:
            raise RecipeError(
                f"objective.value_clip={self.value_clip} has no effect with value_weight=0; remove it, or set a value_weight "
                f"such as 0.5"
            )
        if self.kl_weight < 0.0:
            raise RecipeError(f"objective.kl_weight={self.kl_weight}; expected 0 or more")
        if self.correction_cap != 3.0 and self.correction == "none":
            raise RecipeError(
                f'objective.correction_cap={self.correction_cap} has no effect with correction="none"; remove it, or choose a '
                f"correction such as token_truncate"
            )

    @property
    def _form(self) -> ActionLoss:
        return POLICY_LOSSES[self.loss]

    @property
    def required_leaves(self) -> frozenset[str]:  # pyright: ignore[reportIncompatibleVariableOverride]
        return DecoderObjective.required_leaves | {"segment", "position", *self.leaf_axes}

    @property
    def leaf_axes(self) -> Mapping[str, Axes]:  # pyright: ignore[reportIncompatibleVariableOverride]
        axes = {**dict.fromkeys(self.leaf_ranges, _AXES), **(KEPT_AXES if self.replay_sampling else {})}
        return {**axes, EXPERTS_LEAF: EXPERTS_AXES} if self.replay_experts else axes

    @property
    def id_leaves(self) -> frozenset[str]:  # pyright: ignore[reportIncompatibleVariableOverride]
        return frozenset({KEPT_LEAF}) if self.replay_sampling else frozenset()

    @property
    def replays_experts(self) -> bool:
        return self.replay_experts

    @property
    def leaf_ranges(self) -> Mapping[str, LeafRange]:
        finite = LeafRange(counted_by=MASK_LEAF, advice="give each action a finite advantage")
        ranges = {ADVANTAGE_LEAF: finite, BEHAVIOR_LEAF: _LOG_PROBABILITY}
        if self.several_updates:
            ranges[OLD_LEAF] = _LOG_PROBABILITY
        if self.kl_weight:
            ranges[REFERENCE_LEAF] = _LOG_PROBABILITY
        if self.value_weight:
            ranges[RETURN_LEAF] = LeafRange(counted_by=MASK_LEAF, advice="give each action a finite return")
        if self._clips_values:
            ranges[OLD_VALUE_LEAF] = LeafRange(counted_by=MASK_LEAF, advice="evaluate the values of the trainer")
        if self.replay_sampling:
            advice = "store the number of tokens among which an action was drawn (`GeneratedToken.kept_count`)"
            ranges[KEPT_COUNT_LEAF] = LeafRange(1, integral=True, counted_by=MASK_LEAF, advice=advice)
        if self.replay_experts:
            # The task knows how many there are.
            ranges[EXPERTS_LEAF] = LeafRange(-1, integral=True)
        return ranges

    @property
    def rollout_needs(self) -> RolloutNeeds:
        return RolloutNeeds(
            self.temperature,
            self.several_updates,
            self.kl_weight > 0.0,
            self.max_answer,
            values=self.estimates_values,
            old_values=self._clips_values,
            kept=self.replay_sampling,
        )

    @property
    def estimates_values(self) -> bool:
        return self.value_weight > 0.0

    @property
    def _clips_values(self) -> bool:
        return self.estimates_values and self.value_clip is not None

    @property
    def leaf_advice(self) -> Mapping[str, str]:
        advice = {
            ADVANTAGE_LEAF: "PolicyGradient learns from rollouts, of which each action has an advantage; for answers without "
            "rewards train on the next token",
            BEHAVIOR_LEAF: "store the log-probability that each action was sampled with "
            "(`GeneratedToken.sampling_log_probability`)",
            OLD_LEAF: "evaluate it by the trainer before the first update of a rollout, or set several_updates=False",
            REFERENCE_LEAF: "evaluate the reference model on the rollout, or set kl_weight=0",
            RETURN_LEAF: "estimate it from rewards and values (panax.rollouts.Gae), or set value_weight=0",
            OLD_VALUE_LEAF: "evaluate it by the trainer before the first update of a rollout, or set value_clip=None",
            KEPT_LEAF: "store the tokens among which each action was drawn (`GeneratedToken.kept`), or set replay_sampling=False",
            KEPT_COUNT_LEAF: "store their number (`GeneratedToken.kept_count`), or set replay_sampling=False",
            EXPERTS_LEAF: "store the experts of each position (`Completion.experts`), or set replay_experts=False",
        }
        return {name: advice[name] for name in self.leaf_axes}

    def loss_weights(self, batch: Batch) -> Mapping[str, Float[Array, ""]]:
        first = (number_targets(_flatten_rows(batch)) == 1.0).astype(jnp.float32)
        weight = self._divide_by(first.sum(), batch[MASK_LEAF].sum())
        weights = {"policy": weight, **({"kl": weight} if self.kl_weight else {})}
        return {**weights, "value": batch[MASK_LEAF].sum()} if self.value_weight else weights

    def _divide_by(self, answers: Float[Array, ""], actions: Float[Array, ""]) -> Float[Array, ""]:
        """Return the denominator."""
        match self._form.denominator:
            case "answers":
                return answers
            case "actions":
                return actions
            case "max_answer":
                return answers * self.max_answer

    def targets(self, batch: Batch) -> Mapping[str, Array]:
        slots = find_slots(batch)
        return {
            **super().targets(batch),
            **{name: batch[name] for name in self.leaf_axes if name != EXPERTS_LEAF},
            "slot": slots.slot,
            "stray": slots.stray,
            "first": (number_targets(batch) == 1.0).astype(jnp.float32),
        }

    def compute(self, head: VocabularyHead, targets: Mapping[str, Array], train: bool) -> tuple[Losses, Metrics]:
        mask, slot, first = targets[MASK_LEAF], targets["slot"], targets["first"]
        counted = mask != 0
        current = target_log_probabilities(head, targets, self.temperature)
        constant = jax.lax.stop_gradient(current)
        old = _read(targets[OLD_LEAF], counted) if self.several_updates else constant
        gap = jnp.where(counted, old - _read(targets[BEHAVIOR_LEAF], counted), 0.0)
        log_ratio = jnp.where(counted, current - old, 0.0)
        # Of each answer, at all of its positions: its number of actions, of first actions, and the sums over its actions.
        columns = [mask, first, gap] if self.ratio == "token" else [mask, first, gap, log_ratio]
        sums = expand_sums(sum_segments(jnp.stack(columns, axis=-1), slot), slot)
        length = jnp.maximum(jax.lax.stop_gradient(sums[..., 0]), 1.0)
        ratio = bound_exp(log_ratio if self.ratio == "token" else sums[..., 3] / length)
        advantage = jnp.where(counted, targets[ADVANTAGE_LEAF], 0.0)
        terms = self._form.compute(Actions(current, ratio, advantage), self)
        share = mask / length if self._form.averages else mask
        answers, actions = first.sum(), mask.sum()
        weight = self._divide_by(answers, actions)
        metrics: dict[str, Mean | Sum | Maximum | DataChecks] = {}
        if self.correction != "none":
            by_answer = self.correction.startswith("sequence")
            log_weight = jax.lax.stop_gradient(sums[..., 2] if by_answer else gap)
            correction = correct_sampling(log_weight, self.correction, self.correction_cap)
            terms = terms * correction
            once = first if by_answer else mask
            metrics["correction"] = Mean((correction * once).sum(), once.sum())
        losses = {"policy": Loss((terms * share).sum(), weight)}
        if self.kl_weight:
            divergence = estimate_divergence(current, _read(targets[REFERENCE_LEAF], counted))
            divergence = jnp.where(counted, divergence, 0.0)
            losses["kl"] = Loss((divergence * share).sum(), weight, self.kl_weight)
            metrics["kl"] = Mean((divergence * mask).sum(), actions)
        if self.value_weight:
            values, old_value = head.values(), targets.get(OLD_VALUE_LEAF)
            old_value = None if old_value is None else _read(old_value, counted)
            value_terms, value_clipped = value_loss(
                values, _read(targets[RETURN_LEAF], counted), old_value, self.value_clip
            )
            losses["value"] = Loss(jnp.where(counted, value_terms, 0.0).sum(), actions, self.value_weight)
            metrics["value"] = Mean(jnp.where(counted, jax.lax.stop_gradient(values), 0.0).sum(), actions)
            metrics["clipped/value"] = Mean(jnp.where(value_clipped, mask, 0.0).sum(), actions)
        # A ratio of an answer counts once, at its first action.
        once = mask if self.ratio == "token" else first
        for name, clipped in self._find_clipped(ratio, advantage).items():
            metrics[f"clipped/{name}"] = Mean(jnp.where(clipped, once, 0.0).sum(), once.sum())
        metrics |= {
            "ratio": Mean((ratio * once).sum(), once.sum()),
            "entropy": Mean(-(current * mask).sum(), actions),
            "gap/token": Mean((jnp.abs(gap) * mask).sum(), actions),
            "gap/largest": Maximum(jnp.abs(gap).max()),
            "gap/sequence": Mean((jnp.abs(sums[..., 2]) * first).sum(), answers),
            "answer_tokens": Mean(actions, answers),
            "answers": Sum(answers),
            "tokens": Sum(actions),
            "answer_faults": _check_answers(jax.lax.stop_gradient(sums), mask, targets["stray"]),
        }
        if self.replay_sampling:
            metrics["kept_faults"] = _check_kept(targets)
        return losses, metrics

    def _find_clipped(self, ratio: Array, advantage: Array) -> Mapping[str, Bool[Array, "batch seq"]]:
        """Return which ratios are clipped so that their actions have no gradient, or, of cispo, are bounded."""
        if self.loss == "cispo":
            return {"high": (ratio > self.clip_high) & (advantage > 0.0)}
        if "clip_low" not in self._form.settings:
            return {}
        return {
            "low": (ratio < 1.0 - self.clip_low) & (advantage < 0.0),
            "high": (ratio > 1.0 + self.clip_high) & (advantage > 0.0),
        }


def _read(leaf: Float[Array, "batch seq"], counted: Bool[Array, "batch seq"]) -> Float[Array, "batch seq"]:
    """Return a leaf as a constant, 0 for targets without a value."""
    return jax.lax.stop_gradient(jnp.where(counted, leaf, 0.0))


def _flatten_rows(batch: Batch) -> Batch:
    """Return the leaves that number targets, with all micro-batches' rows as one axis."""
    return {name: batch[name].reshape(-1, batch[name].shape[-1]) for name in (MASK_LEAF, "position")}


def _check_kept(targets: Mapping[str, Array]) -> DataChecks:
    """Check that each action is among the tokens that its sampler kept."""
    ids, kept, count = targets["targets"], targets[KEPT_LEAF], targets[KEPT_COUNT_LEAF]
    places = jnp.arange(kept.shape[-1]).reshape(1, 1, -1)
    is_kept = ((kept == ids[..., None]) & (places < count[..., None])).any(axis=-1)
    worst = jnp.where((targets[MASK_LEAF] != 0) & ~is_kept, ids.astype(jnp.float32), NO_FAULT).max()
    check = "an action is not among the tokens that its sampler kept, so that it could not be drawn; expected `kept_tokens` and "
    return DataChecks(worst[None], (f"{check}`kept_count` of the same draw. Its token: ",))


def _check_answers(
    sums: Float[Array, "batch seq value"], mask: Float[Array, "batch seq"], stray: Float[Array, "batch seq"]
) -> DataChecks:
    """Check that actions have the weight 1 and belong to answers that begin at position 0.

    Args:
        sums: Of each position's answer, its number of actions, and of first actions.
    """
    counted = mask != 0
    worst = [
        jnp.where(counted & (mask != 1.0), mask, NO_FAULT).max(),
        jnp.where(counted & (sums[..., 1] != 1.0), sums[..., 1], NO_FAULT).max(),
        jnp.where(stray > 0, 1.0, NO_FAULT).max(),
    ]
    checks = (
        "loss_mask of an action is neither 0 nor 1, and actions have no weights other than their advantages: ",
        "an action is outside of all segments, or its answer's position does not begin at 0 and count up; expected each "
        "answer as one segment of a row. First actions of this answer, of which there is one: ",
        "a row has more segments than its positions allow: ",
    )
    return DataChecks(jnp.stack(worst), checks)
