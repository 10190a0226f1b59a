"""The table of losses of preference pairs: each a function of the log-probabilities of both answers.

Values equal those of TRL 1.16, but for the differences noted at some losses.
"""

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax.nn import log_sigmoid, sigmoid
from jaxtyping import Array, Float

from .sorted_losses import aot, aot_unpaired

if TYPE_CHECKING:
    from .preference import Preference

PreferenceLoss = Literal[
    "sigmoid", "hinge", "ipo", "robust", "exo_pair", "nca_pair", "bco_pair", "sppo_hard", "apo_zero", "apo_down",
    "discopop", "sigmoid_norm", "aot", "aot_unpaired", "orpo", "simpo", "cpo",
]  # fmt: skip
Divergence = Literal["reverse_kl", "forward_kl", "js", "alpha"]

_MAX_EXPONENT = 80.0
"""Exponents above it would overflow float32."""


class Answers(NamedTuple):
    """One answer of each pair.

    Attributes:
        log_probability: Sum over the answer's tokens.
        reference: The same of the reference model; 0 without one.
        tokens: Number of the answer's tokens with loss.
    """

    log_probability: Float[Array, " pair"]
    reference: Float[Array, " pair"]
    tokens: Float[Array, " pair"]

    @property
    def ratio(self) -> Float[Array, " pair"]:
        """Logarithm of the ratio of the model's probability to the reference's."""
        return self.log_probability - self.reference

    @property
    def average(self) -> Float[Array, " pair"]:
        """Log-probability per token."""
        return self.log_probability / jnp.maximum(self.tokens, 1.0)


class Pairs(NamedTuple):
    """The answers of pairs."""

    chosen: Answers
    rejected: Answers


class PairLoss(NamedTuple):
    """A loss of the table.

    Attributes:
        compute: Function from pairs and settings to the loss of each pair.
        settings: Settings of `Preference` that it reads; to set others is an error.
        has_reference: True if it compares with a reference model.
        averages: True if rewards and reported log-probabilities are per token.
        sft_weight: Weight of the cross-entropy of chosen answers, unless set.
        compute_among: In place of `compute` for a loss that compares the pairs of the global batch with each other: it reads
            which pairs this device counts, too.
    """

    compute: "Callable[[Pairs, Preference], Float[Array, ' pair']]"
    settings: frozenset[str] = frozenset()
    has_reference: bool = True
    averages: bool = False
    sft_weight: float = 0.0
    compute_among: "Callable[[Pairs, Float[Array, ' pair'], Preference], Float[Array, ' pair']] | None" = None


def _score(answers: Answers, settings: "Preference") -> Float[Array, " pair"]:
    """Return f'(ratio of probabilities) for the f-divergence that binds the model to the reference (arXiv:2309.16240)."""
    ratio = answers.ratio
    match settings.divergence:
        case "reverse_kl":
            return ratio
        case "forward_kl":
            return 1.0 - jnp.exp(-ratio)
        case "js":
            return jnp.log(2.0) + log_sigmoid(ratio)
        case "alpha":
            power = settings.divergence_alpha - 1.0
            return (jnp.exp(jnp.minimum(power * ratio, _MAX_EXPONENT)) - 1.0) / power


def _margin(pairs: Pairs, settings: "Preference") -> Float[Array, " pair"]:
    return settings.beta * (_score(pairs.chosen, settings) - _score(pairs.rejected, settings))


def _margin_per_token(pairs: Pairs, settings: "Preference") -> Float[Array, " pair"]:
    chosen, rejected = (_score(each, settings) / jnp.maximum(each.tokens, 1.0) for each in pairs)
    return chosen - rejected


def _smoothed(margin: Float[Array, " pair"], smoothing: float) -> Float[Array, " pair"]:
    """Return the logistic loss if this share of pairs is labeled the wrong way round."""
    loss = -(1.0 - smoothing) * log_sigmoid(margin)
    return loss - smoothing * log_sigmoid(-margin) if smoothing else loss


def _sigmoid(pairs: Pairs, settings: "Preference") -> Float[Array, " pair"]:
    """DPO (arXiv:2305.18290), equation 7. TRL 1.16 ignores label smoothing here."""
    return _smoothed(_margin(pairs, settings), settings.label_smoothing)


def _hinge(pairs: Pairs, settings: "Preference") -> Float[Array, " pair"]:
    """SLiC (arXiv:2305.10425) on the margin of DPO, as RSO (arXiv:2309.06657) has it."""
    return jax.nn.relu(1.0 - _margin(pairs, settings))


def _ipo(pairs: Pairs, settings: "Preference") -> Float[Array, " pair"]:
    """IPO (arXiv:2310.12036), equation 17, with log-probabilities per token, as its authors compute it."""
    return (_margin_per_token(pairs, settings) - 1.0 / (2.0 * settings.beta)) ** 2


def _robust(pairs: Pairs, settings: "Preference") -> Float[Array, " pair"]:
    """Unbiased under flipped labels: robust DPO (arXiv:2403.00409), equation 12."""
    margin, flipped = _margin(pairs, settings), settings.label_smoothing
    clean = -(1.0 - flipped) * log_sigmoid(margin) + flipped * log_sigmoid(-margin)
    return clean / (1.0 - 2.0 * flipped)


def _exo_pair(pairs: Pairs, settings: "Preference") -> Float[Array, " pair"]:
    """EXO of pairs (arXiv:2402.00856), equation 16."""
    margin, noise = _margin(pairs, settings), settings.label_smoothing
    chosen = sigmoid(margin) * (log_sigmoid(margin) - jnp.log1p(-noise))
    return chosen + sigmoid(-margin) * (log_sigmoid(-margin) - jnp.log(noise))


def _nca_pair(pairs: Pairs, settings: "Preference") -> Float[Array, " pair"]:
    """NCA of pairs (arXiv:2402.05369), section 3.2."""
    chosen, rejected = (settings.beta * each.ratio for each in pairs)
    return -log_sigmoid(chosen) - 0.5 * log_sigmoid(-chosen) - 0.5 * log_sigmoid(-rejected)


def _bco_pair(pairs: Pairs, settings: "Preference") -> Float[Array, " pair"]:
    """BCO (arXiv:2404.04656) without its shift of rewards, as TRL's loss of pairs."""
    chosen, rejected = (settings.beta * each.ratio for each in pairs)
    return -log_sigmoid(chosen) - log_sigmoid(-rejected)


def _sppo_hard(pairs: Pairs, settings: "Preference") -> Float[Array, " pair"]:
    """SPPO (arXiv:2405.00675), equation 4.7, with probabilities of winning of 1 and 0."""
    half = 0.5 / settings.beta
    return (pairs.chosen.ratio - half) ** 2 + (pairs.rejected.ratio + half) ** 2


def _apo_zero(pairs: Pairs, settings: "Preference") -> Float[Array, " pair"]:
    """APO-zero (arXiv:2408.06266), equation 7: if chosen answers are better than the model's own."""
    chosen, rejected = (settings.beta * each.ratio for each in pairs)
    return sigmoid(-chosen) + sigmoid(rejected)


def _apo_down(pairs: Pairs, settings: "Preference") -> Float[Array, " pair"]:
    """APO-down (arXiv:2408.06266), equation 8: if chosen answers are worse than the model's own."""
    chosen, rejected = (settings.beta * each.ratio for each in pairs)
    return sigmoid(chosen) + sigmoid(rejected - chosen)


def _discopop(pairs: Pairs, settings: "Preference") -> Float[Array, " pair"]:
    """DiscoPOP (arXiv:2406.08414), equation 5: logistic and exponential, mixed by the margin."""
    margin = _margin(pairs, settings)
    mixed = sigmoid(margin / settings.temperature)
    return -log_sigmoid(margin) * (1.0 - mixed) + jnp.exp(-margin) * mixed


def _sigmoid_norm(pairs: Pairs, settings: "Preference") -> Float[Array, " pair"]:
    """DPO with log-probabilities per token (arXiv:2411.15124), section 5.1.2."""
    return -log_sigmoid(settings.beta * _margin_per_token(pairs, settings))


def _orpo(pairs: Pairs, settings: "Preference") -> Float[Array, " pair"]:
    """ORPO (arXiv:2403.07691), equation 7, times beta; its other term is the cross-entropy of chosen answers.

    TRL's cross-entropy covers the prompt too.
    """
    log_odds = _log_odds(pairs.chosen.average) - _log_odds(pairs.rejected.average)
    return -settings.beta * log_sigmoid(log_odds)


def _log_odds(log_probability: Float[Array, " pair"]) -> Float[Array, " pair"]:
    """Return log(p / (1 - p)), from log p below 0."""
    # Each branch is exact where it is taken; the other gets a value at which its derivative is finite.
    near_one = log_probability > -jnp.log(2.0)
    small = jnp.log(-jnp.expm1(jnp.where(near_one, log_probability, -1.0)))
    large = jnp.log1p(-jnp.exp(jnp.where(near_one, -1.0, log_probability)))
    return log_probability - jnp.where(near_one, small, large)


def _simpo(pairs: Pairs, settings: "Preference") -> Float[Array, " pair"]:
    """SimPO (arXiv:2405.14734), equation 6; `target_margin` is its gamma."""
    margin = settings.beta * (pairs.chosen.average - pairs.rejected.average) - settings.target_margin
    return _smoothed(margin, settings.label_smoothing)


def _cpo(pairs: Pairs, settings: "Preference") -> Float[Array, " pair"]:
    """CPO (arXiv:2401.08417), equation 3; its other term is the cross-entropy of chosen answers."""
    margin = settings.beta * (pairs.chosen.log_probability - pairs.rejected.log_probability)
    return _smoothed(margin, settings.label_smoothing)


def _among(
    compute: "Callable[[Pairs, Float[Array, ' pair'], Preference], Float[Array, ' pair']]", settings: frozenset[str]
) -> PairLoss:
    """Return the entry of a loss of all pairs together."""

    def compute_all(pairs: Pairs, preference: "Preference") -> Float[Array, " pair"]:
        return compute(pairs, jnp.ones_like(pairs.chosen.tokens), preference)

    return PairLoss(compute_all, settings, compute_among=compute)


_OF_MARGIN = frozenset({"divergence"})
_SMOOTHED = frozenset({"label_smoothing"})

PREFERENCE_LOSSES: Mapping[str, PairLoss] = {
    "sigmoid": PairLoss(_sigmoid, _OF_MARGIN | _SMOOTHED),
    "hinge": PairLoss(_hinge, _OF_MARGIN),
    "ipo": PairLoss(_ipo, _OF_MARGIN),
    "robust": PairLoss(_robust, _OF_MARGIN | _SMOOTHED),
    "exo_pair": PairLoss(_exo_pair, _OF_MARGIN | _SMOOTHED),
    "nca_pair": PairLoss(_nca_pair),
    "bco_pair": PairLoss(_bco_pair),
    "sppo_hard": PairLoss(_sppo_hard),
    "apo_zero": PairLoss(_apo_zero),
    "apo_down": PairLoss(_apo_down),
    "discopop": PairLoss(_discopop, _OF_MARGIN | {"temperature"}),
    "sigmoid_norm": PairLoss(_sigmoid_norm, _OF_MARGIN),
    "aot": _among(aot, _SMOOTHED),
    "aot_unpaired": _among(aot_unpaired, _SMOOTHED),
    "orpo": PairLoss(_orpo, has_reference=False, averages=True, sft_weight=1.0),
    "simpo": PairLoss(_simpo, _SMOOTHED | {"target_margin"}, has_reference=False, averages=True),
    "cpo": PairLoss(_cpo, _SMOOTHED, has_reference=False, sft_weight=1.0),
}
"""All losses by the names that TRL gives them."""
