"""The table of policy-gradient losses: each a function of an action's ratio and advantage, with its denominator.

An action has three log-probabilities. *Current* is that of the parameters being trained, *old* that before the
first update of a rollout, and *behavior* that which the sampler drew the action with. Ratios are current to old; behavior
enters by `correct_sampling` alone, as a constant.

Values equal those of TRL 1.16 with one micro-batch, in which an answer without actions counts too.
"""

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax.nn import sigmoid
from jaxtyping import Array, Float

if TYPE_CHECKING:
    from .policy_gradient import PolicyGradient

PolicyLoss = Literal["grpo", "bnpo", "dr_grpo", "dapo", "cispo", "sapo", "luspo"]
Denominator = Literal["answers", "actions", "max_answer"]
Correction = Literal["none", "token_truncate", "token_mask", "sequence_truncate", "sequence_mask"]

_MAX_EXPONENT = 80.0
"""Exponents above it would overflow float32."""


class Actions(NamedTuple):
    """The actions of a batch.

    Attributes:
        log_probability: Current log-probability.
        ratio: Current to old probability of the action, or of its answer, per action.
        advantage: Advantage of the action.
    """

    log_probability: Float[Array, "batch seq"]
    ratio: Float[Array, "batch seq"]
    advantage: Float[Array, "batch seq"]


class ActionLoss(NamedTuple):
    """A loss of the table.

    Attributes:
        compute: Function from actions and settings to the loss of each action.
        settings: Settings of `PolicyGradient` that it reads; to change others is an error.
        denominator: Divisor of the sum over the global batch: the number of answers with actions, that of actions, or that of
            answers times `max_answer`.
        averages: True if an answer adds the mean over its actions, and not their sum.
    """

    compute: "Callable[[Actions, PolicyGradient], Float[Array, 'batch seq']]"
    settings: frozenset[str]
    denominator: Denominator
    averages: bool = False


def bound_exp(exponent: Float[Array, "batch seq"]) -> Float[Array, "batch seq"]:
    """Return the exponential, with exponents bounded so that it is finite, and a derivative of 0 beyond the bound."""
    return jnp.exp(jnp.minimum(exponent, _MAX_EXPONENT))


def estimate_divergence(
    log_probability: Float[Array, "batch seq"], reference: Float[Array, "batch seq"]
) -> Float[Array, "batch seq"]:
    """Estimate the divergence from a reference model by each drawn action, in nats: 0 or more, with the expectation of the
    Kullback-Leibler divergence if the action was drawn from the model.

    Source: GRPO (arXiv:2402.03300), equation 4, the estimator known as k3.
    """
    log_ratio = reference - log_probability
    return bound_exp(log_ratio) - log_ratio - 1.0


def correct_sampling(
    log_weight: Float[Array, "batch seq"], correction: Correction, cap: float
) -> Float[Array, "batch seq"]:
    """Return the weight of each action, or answer, that was drawn by another distribution than the trainer's.

    Weights above the cap are lowered to it (truncate) or set to 0 (mask).

    Source: truncated importance sampling, IMPALA (arXiv:1802.01561), section 4.1, for `truncate`.

    Args:
        log_weight: Old minus behavior log-probability: of an action, or summed over its answer.
        correction: Other than none.
    """
    weight = bound_exp(log_weight)
    return jnp.minimum(weight, cap) if correction.endswith("truncate") else jnp.where(weight > cap, 0.0, weight)


def clip_ratio(actions: Actions, settings: "PolicyGradient") -> Float[Array, "batch seq"]:
    """Return the smaller of the gains with and without a clipped ratio, negated: PPO (arXiv:1707.06347), equation 7.

    The upper clip may differ from the lower one: DAPO (arXiv:2503.14476), section 3.1. `two_sided_clip` bounds the ratio
    of actions with negative advantage, which is unbounded otherwise: INTELLECT-2 (arXiv:2505.07291).
    """
    clipped = jnp.clip(actions.ratio, 1.0 - settings.clip_low, 1.0 + settings.clip_high)
    ratio = actions.ratio if settings.two_sided_clip is None else jnp.minimum(actions.ratio, settings.two_sided_clip)
    return -jnp.minimum(ratio * actions.advantage, clipped * actions.advantage)


def weight_log_probability(actions: Actions, settings: "PolicyGradient") -> Float[Array, "batch seq"]:
    """Return the log-probability times the advantage, weighted by the ratio as a constant of at most `clip_high`, negated, so
    that actions with a clipped ratio have a gradient too: CISPO (arXiv:2506.13585), with an upper bound only, as in ScaleRL
    (arXiv:2510.13786).
    """
    weight = jax.lax.stop_gradient(jnp.minimum(actions.ratio, settings.clip_high))
    return -weight * actions.advantage * actions.log_probability


def gate_ratio(actions: Actions, settings: "PolicyGradient") -> Float[Array, "batch seq"]:
    """Return the advantage times a soft gate of the ratio, negated: SAPO (arXiv:2511.20347)."""
    temperature = jnp.where(actions.advantage > 0.0, settings.positive_temperature, settings.negative_temperature)
    return -(sigmoid(temperature * (actions.ratio - 1.0)) * 4.0 / temperature) * actions.advantage


_CLIP = frozenset({"clip_low", "clip_high", "two_sided_clip"})

POLICY_LOSSES: Mapping[PolicyLoss, ActionLoss] = {
    "grpo": ActionLoss(clip_ratio, _CLIP, "answers", averages=True),
    "bnpo": ActionLoss(clip_ratio, _CLIP, "actions"),
    "dr_grpo": ActionLoss(clip_ratio, _CLIP | {"max_answer"}, "max_answer"),
    "dapo": ActionLoss(clip_ratio, _CLIP, "actions"),
    "cispo": ActionLoss(weight_log_probability, frozenset({"clip_high"}), "actions"),
    "sapo": ActionLoss(
        gate_ratio, frozenset({"positive_temperature", "negative_temperature"}), "answers", averages=True
    ),
    "luspo": ActionLoss(clip_ratio, _CLIP, "answers"),
}
"""The losses by name."""
