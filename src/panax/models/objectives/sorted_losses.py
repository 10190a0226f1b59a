"""AOT: losses of distributions of answers, by their order in the global batch (arXiv:2406.05882).

The i-th smallest value of one distribution is compared with the i-th smallest of another, over all pairs of the global
batch. Each device has some of the pairs: it gathers one number for each pair of all devices, finds the places of its own
pairs in the order, and the values at these places of the other distribution. Those are constants of its loss, so
that no collective is differentiated: with a and b both sorted,

    sum_i f(a_i - b_i) has the derivative f'(a_i - b_i) by a_i, and -f'(a_i - b_i) by b_i,

of which each device computes the terms of its own a and of its own b.
"""

from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
from jax.nn import log_sigmoid
from jaxtyping import Array, Float

from ...spmd import ValueState, assert_sharding, token_axes
from ...spmd.collectives import all_gather, axis_index
from .segment_totals import row_axes

if TYPE_CHECKING:
    from .preference import Preference
    from .preference_losses import Pairs


def aot(pairs: "Pairs", counted: Float[Array, " pair"], settings: "Preference") -> Float[Array, " pair"]:
    """AOT of pairs: the model's margins dominate the reference's, both sorted.

    Args:
        counted: 1 for the pairs of which this device adds the loss, else 0.
    """
    margin = pairs.chosen.log_probability - pairs.rejected.log_probability
    reference = pairs.chosen.reference - pairs.rejected.reference
    return _loss(margin - _at_same_place(margin, reference, counted), settings)


def aot_unpaired(pairs: "Pairs", counted: Float[Array, " pair"], settings: "Preference") -> Float[Array, " pair"]:
    """AOT without pairs: the ratios of chosen answers dominate those of rejected ones, both sorted; arguments as in `aot`."""
    chosen, rejected = pairs.chosen.ratio, pairs.rejected.ratio
    of_chosen = _loss(chosen - _at_same_place(chosen, rejected, counted), settings)
    # The same values in another order, which are counted once, and their derivatives by the rejected answers.
    of_rejected = _loss(_at_same_place(rejected, chosen, counted) - rejected, settings)
    return of_chosen + of_rejected - jax.lax.stop_gradient(of_rejected)


def _loss(difference: Float[Array, " pair"], settings: "Preference") -> Float[Array, " pair"]:
    smoothing = settings.label_smoothing
    loss = -(1.0 - smoothing) * log_sigmoid(settings.beta * difference)
    return loss - smoothing * log_sigmoid(-settings.beta * difference) if smoothing else loss


def _at_same_place(
    values: Float[Array, " pair"], others: Float[Array, " pair"], counted: Float[Array, " pair"]
) -> Float[Array, " pair"]:
    """Return for each value the one of `others` with the same place in the order over all devices; constants."""
    axes, count = token_axes(), values.shape[0]
    counted = assert_sharding(counted, dict.fromkeys(axes, ValueState.OWN))
    # Pairs that don't count are last in both orders.
    both = jnp.where(counted[:, None] > 0, jnp.stack([values, others], axis=-1), jnp.inf)
    gathered = all_gather(jax.lax.stop_gradient(both), axes, 0)
    order = jnp.argsort(gathered[:, 0], stable=True)
    matched = jnp.zeros(gathered.shape[0], values.dtype).at[order].set(jnp.sort(gathered[:, 1]))
    partners = jax.lax.dynamic_slice_in_dim(matched, axis_index(axes) * count, count)
    # Only those that count are read, so that values of the same row may be declared the same on all of its devices.
    same = dict.fromkeys(row_axes(), ValueState.WHOLE)
    return assert_sharding(jnp.where(counted > 0, partners, 0.0), dict.fromkeys(axes, ValueState.SPLIT) | same)
