"""`Preference`: learn from pairs of answers, of which one is better (DPO and its kin)."""

import dataclasses
from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import ClassVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from ...core import Axes, Batch, Loss, Mean, Sum
from ...core.batch_checks import MASK_LEAF, REFERENCE_LEAF, LeafRange
from ...core.errors import RecipeError
from ...core.measures import Losses, Metrics
from ...core.validation import Validated
from .answer_order import number_targets, weight_longer_parts
from .chosen_monitor import ChosenMonitor
from .objective import DecoderObjective, VocabularyHead
from .pair_checks import check_pairs, count_chosen_starts, mark_chosen
from .preference_losses import PREFERENCE_LOSSES, Answers, Divergence, PairLoss, Pairs, PreferenceLoss
from .segment_totals import find_slots, sum_own_positions, sum_segments

REFERENCE_RANGE = LeafRange(
    counted_by=MASK_LEAF, advice="compute it for these pairs, as they are cut to rows, with panax.add_reference"
)
"""Finite wherever a target has loss."""

_DEFAULTS = {"label_smoothing": 0.0, "divergence": "reverse_kl", "temperature": 0.05, "target_margin": 0.5}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Preference(Validated, DecoderObjective):
    """Raise the probability of chosen answers over that of rejected ones.

    A pair lies in one row: its chosen answer, after the prompt, is a segment of odd number, its rejected one, after the
    same prompt, the next segment; a row may have several pairs. So rows stay independent, and a pair is never
    split over micro-batches. `loss_mask` is 1 for the targets in answers.
    A reference model's log-probabilities come with the batch, one for each target, as the leaf
    `reference_log_probability`: they are computed once, by `compute_reference`, and no second model is in memory.

    The loss is the mean over the pairs of the global batch. With `sft_weight`, the mean cross-entropy of the chosen
    answers' targets, over those of the global batch, is added.

    Sources: DPO (arXiv:2305.18290); of other losses, in `preference_losses.py`.

    Attributes:
        loss: The loss of a pair, by TRL's names.
        beta: Strength of the bond to the reference model, or the scale of the margin.
        other_losses: Further losses of the same pairs, each with its weight.
        sft_weight: Weight of the cross-entropy of chosen answers. None: 1 for orpo and cpo, which have it, else 0.
        label_smoothing: Share of pairs that are labeled the wrong way round.
        reference_free: Take a reference model of equal log-probabilities for all answers.
        divergence: The f-divergence that binds the model to the reference.
        divergence_alpha: Exponent of the alpha divergence.
        temperature: Of discopop's mixture.
        target_margin: Margin that simpo asks for, in units of the scaled margin.
        ld_alpha: Weight, in [0, 1], of the log-probabilities of an answer's targets beyond the length of the shorter answer,
            of which a smaller one makes length count less: LD-DPO (arXiv:2409.06411). None: 1.
        weight_by_likelihood: Multiply each pair's loss by both answers' probability, per token and divided by the sum of all
            tokens' squared probabilities, so that pairs like the model's own answers count more: WPO (arXiv:2406.11827),
            equation 2.
    """

    loss: PreferenceLoss = "sigmoid"
    beta: float = 0.1
    other_losses: Mapping[str, float] = dataclasses.field(default_factory=dict, hash=False)
    sft_weight: float | None = None
    label_smoothing: float = 0.0
    reference_free: bool = False
    divergence: Divergence = "reverse_kl"
    divergence_alpha: float = 0.5
    temperature: float = 0.05
    target_margin: float = 0.5
    ld_alpha: float | None = None
    weight_by_likelihood: bool = False

    reads_pairs: ClassVar[bool] = True

    def __post_init__(self) -> None:
        for name in self.other_losses:
            if name not in PREFERENCE_LOSSES or name == self.loss:
                raise RecipeError(
                    f"objective.other_losses has {name!r}; expected losses other than loss={self.loss!r}, of "
                    f"{', '.join(PREFERENCE_LOSSES)}"
                )
        for name in ("beta", "temperature", "divergence_alpha"):
            if not getattr(self, name) > 0.0:
                raise RecipeError(f"objective.{name}={getattr(self, name)}; expected a positive number")
        if self.divergence_alpha == 1.0:
            raise RecipeError('objective.divergence_alpha=1.0; its limit is divergence="reverse_kl": set that')
        if (self.sft_weight or 0.0) < 0.0:
            raise RecipeError(f"objective.sft_weight={self.sft_weight}; expected 0 or more")
        if not 0.0 <= self.label_smoothing < 0.5:
            raise RecipeError(
                f"objective.label_smoothing={self.label_smoothing}; expected a share in [0, 0.5): with half of the pairs the "
                f"wrong way round there is nothing to learn"
            )
        if "exo_pair" in self._table and not self.label_smoothing:
            raise RecipeError("objective.label_smoothing=0 makes the loss exo_pair infinite; set a share such as 1e-3")
        if self.ld_alpha is not None and not 0.0 <= self.ld_alpha <= 1.0:
            raise RecipeError(f"objective.ld_alpha={self.ld_alpha}; expected a weight in [0, 1]")
        if self.weight_by_likelihood and not self.sums_over_rows:
            raise RecipeError(
                f"objective.weight_by_likelihood weights pairs, and the loss {', '.join(self._table)} has parts that sort them; "
                f"remove one of them"
            )
        self._check_effects()

    def _check_effects(self) -> None:
        """Check that each setting has an effect."""
        names = ", ".join(self._table)
        used = frozenset[str]().union(*(loss.settings for loss in self._table.values()))
        for name, default in _DEFAULTS.items():
            if getattr(self, name) != default and name not in used:
                raise RecipeError(
                    f"objective.{name}={getattr(self, name)!r} has no effect on the loss {names}; remove it"
                )
        if self.divergence_alpha != 0.5 and self.divergence != "alpha":
            raise RecipeError(
                f"objective.divergence_alpha={self.divergence_alpha} has no effect with "
                f"divergence={self.divergence!r}; remove it"
            )
        if self.reference_free and not any(loss.has_reference for loss in self._table.values()):
            raise RecipeError(f"objective.reference_free has no effect: {names} has no reference model; remove it")

    @property
    def _table(self) -> Mapping[str, PairLoss]:
        return {name: PREFERENCE_LOSSES[name] for name in (self.loss, *self.other_losses)}

    @property
    def sums_over_rows(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        return all(loss.compute_among is None for loss in self._table.values())

    @property
    def needs_reference(self) -> bool:
        """True if batches must have the reference model's log-probabilities."""
        return not self.reference_free and any(loss.has_reference for loss in self._table.values())

    @property
    def chosen_weight(self) -> float:
        """The weight of the cross-entropy of chosen answers."""
        return PREFERENCE_LOSSES[self.loss].sft_weight if self.sft_weight is None else self.sft_weight

    @property
    def required_leaves(self) -> frozenset[str]:  # pyright: ignore[reportIncompatibleVariableOverride]
        return DecoderObjective.required_leaves | {"segment", "position", *self.leaf_axes}

    @property
    def leaf_axes(self) -> Mapping[str, Axes]:  # pyright: ignore[reportIncompatibleVariableOverride]
        return {REFERENCE_LEAF: ("batch", "seq")} if self.needs_reference else MappingProxyType({})

    @property
    def leaf_ranges(self) -> Mapping[str, LeafRange]:
        return {REFERENCE_LEAF: REFERENCE_RANGE} if self.needs_reference else {}

    @property
    def leaf_advice(self) -> Mapping[str, str]:
        return {
            REFERENCE_LEAF: f"the loss {self.loss} compares with a reference model: for a corpus of Preferences call "
            f"panax.add_reference(experiment), which evaluates it once, or choose reference_free=True, or a loss without a "
            f"reference model: orpo, simpo, cpo"
        }

    def create_monitor(self) -> ChosenMonitor:
        return ChosenMonitor()

    def loss_weights(self, batch: Batch) -> Mapping[str, Float[Array, ""]]:
        weights = dict.fromkeys(self._names, count_chosen_starts(batch))
        return weights | {"sft": (batch[MASK_LEAF] * mark_chosen(batch)).sum()} if self.chosen_weight else weights

    @property
    def _names(self) -> Mapping[str, str]:
        """Names of reported losses, with those of the table."""
        return {"preference": self.loss, **{f"preference_{name}": name for name in self.other_losses}}

    def targets(self, batch: Batch) -> Mapping[str, Array]:
        slots = find_slots(batch)
        leaves = {
            **super().targets(batch),
            "slot": slots.slot,
            "starts": slots.starts,
            "chosen": mark_chosen(batch),
            "stray": slots.stray,
        }
        if self.ld_alpha is not None:
            leaves["number"] = number_targets(batch)
        return leaves | {name: batch[name] for name in self.leaf_axes}

    def compute(self, head: VocabularyHead, targets: Mapping[str, Array], train: bool) -> tuple[Losses, Metrics]:
        mask, slot, starts = targets[MASK_LEAF], targets["slot"], targets["starts"]
        log_probability, aligned = self._log_probabilities(head, targets["targets"], mask)
        reference = jnp.where(mask != 0, targets.get(REFERENCE_LEAF, jnp.zeros_like(mask)), 0.0)
        share = mask if self.ld_alpha is None else mask * weight_longer_parts(targets["number"], slot, self.ld_alpha)
        columns = [log_probability * share, reference * share, mask, starts]
        values = jnp.stack(columns if aligned is None else [*columns, aligned * mask], axis=-1)
        sums = sum_segments(values, slot).reshape(-1, 2, values.shape[-1])
        pairs = _present(sums)
        # 1 for the pairs with a chosen answer that begins on this device.
        counted = sum_own_positions((starts * targets["chosen"])[..., None], slot).reshape(-1, 2)[:, 0]
        weight = (starts * targets["chosen"]).sum()
        scale = counted * self._pair_weights(jax.lax.stop_gradient(sums)) if self.weight_by_likelihood else counted
        losses = {
            name: Loss(
                (self._loss(table_name, pairs, counted) * scale).sum(), weight, self.other_losses.get(table_name, 1.0)
            )
            for name, table_name in self._names.items()
        }
        if self.chosen_weight:
            of_chosen = mask * targets["chosen"]
            losses["sft"] = Loss(-(log_probability * of_chosen).sum(), of_chosen.sum(), self.chosen_weight)
        metrics = {name: Mean((value * counted).sum(), weight) for name, value in self._metrics(pairs)}
        faults = check_pairs(jax.lax.stop_gradient(sums[:, :, 2:4]), targets["stray"])
        return losses, {**metrics, "tokens": Sum(mask.sum()), "pairs": Sum(weight), **faults}

    def _log_probabilities(self, head: VocabularyHead, targets: Array, mask: Array) -> tuple[Array, Array | None]:
        """Return the log-probability of each target, and its excess over the logarithm of the sum of all squared probabilities,
        which `weight_by_likelihood` reads; else None.
        """
        if not self.weight_by_likelihood:
            return head.log_probabilities(targets, mask), None
        # With L the logsumexp, log p = z - L(z), and the sum of squares is exp(L(2z) - 2 L(z)): the excess is
        # (2z - L(2z)) - (z - L(z)), a difference of log-probabilities at the temperatures 1/2 and 1.
        both = head.top_log_probabilities(targets[..., None], targets, mask, temperature=0.5)
        return both.target, jax.lax.stop_gradient(both.top[..., 0] - both.target)

    def _pair_weights(self, sums: Float[Array, "pair 2 value"]) -> Float[Array, " pair"]:
        return jnp.exp((sums[:, :, 4] / jnp.maximum(sums[:, :, 2], 1.0)).sum(axis=1))

    def _loss(self, name: str, pairs: Pairs, counted: Float[Array, " pair"]) -> Float[Array, " pair"]:
        loss = PREFERENCE_LOSSES[name]
        return loss.compute(pairs, self) if loss.compute_among is None else loss.compute_among(pairs, counted, self)

    def _metrics(self, pairs: Pairs) -> Iterator[tuple[str, Float[Array, " pair"]]]:
        """Yield TRL's metrics of each pair."""
        averages = PREFERENCE_LOSSES[self.loss].averages
        chosen, rejected = (each.average if averages else each.log_probability for each in pairs)
        rewards = [
            self.beta * (each.average if averages else each.ratio if self.needs_reference else each.log_probability)
            for each in pairs
        ]
        yield "rewards/chosen", rewards[0]
        yield "rewards/rejected", rewards[1]
        yield "rewards/margins", rewards[0] - rewards[1]
        yield "rewards/accuracies", (rewards[0] > rewards[1]).astype(jnp.float32)
        yield "logps/chosen", chosen
        yield "logps/rejected", rejected


def _present(sums: Float[Array, "pair 2 value"]) -> Pairs:
    """Return the pairs; those that do not exist have values at which each loss and its derivative are finite."""
    exists = (sums[:, :, 2] > 0).all(axis=1)
    columns = [jnp.where(exists[:, None], sums[:, :, place], value) for place, value in enumerate((-1.0, -1.0, 1.0))]
    return Pairs(*(Answers(*(column[:, side] for column in columns)) for side in (0, 1)))
