"""Metrics that a user adds to a built-in task, computed in evaluations."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from jaxtyping import Array, Float, Int

from ..core import Mean
from ..core.errors import RecipeError

TokenMetric = Callable[[Float[Array, "*row class"], Int[Array, "*row"], Float[Array, "*row"]], Any]
"""Function from (scores in float32, targets, weights) to a value per target, averaged by weight over all
held-out data.

    def perplexity_free_margin(scores, targets, weights):
        return jnp.max(scores, axis=-1) - jnp.take_along_axis(scores, targets[..., None], axis=-1)[..., 0]

A target's value must depend on its scores only, so that the mean is the same on every mesh. A function may
return a pair: the values and the targets' weights.
"""

RESERVED_NAMES = ("loss", "accuracy", "accuracy_top5", "tokens", "images", "ema_decay", "averaged", "bits_per_byte")


def metrics_field() -> Any:
    """Return the dataclass field of a task's metrics, excluded from checkpoint metadata since functions are
    not serialized.
    """
    return dataclasses.field(default_factory=dict, compare=False, metadata={"saved": False})


def check_names(metrics: Mapping[str, TokenMetric]) -> None:
    """Raise a RecipeError if a metric's name is already taken."""
    for name in metrics:
        if name in RESERVED_NAMES or name.startswith(("loss/", "experts/")):
            raise RecipeError(f"task.metrics has {name!r}, which the task measures itself; rename it")


def compute_token_metrics(
    metrics: Mapping[str, TokenMetric],
    scores: Float[Array, "*row class"],
    targets: Int[Array, "*row"],
    weights: Float[Array, "*row"],
) -> dict[str, Mean]:
    """Compute each metric as a weighted sum and its total weight."""
    means = {}
    for name, function in metrics.items():
        values = function(scores, targets, weights)
        values, metric_weights = values if isinstance(values, tuple) else (values, weights)
        for what, leaf in (("values", values), ("weights", metric_weights)):
            if getattr(leaf, "shape", None) != targets.shape:
                raise RecipeError(
                    f"task.metrics[{name!r}] gives {what} of the shape {getattr(leaf, 'shape', type(leaf).__name__)}; expected "
                    f"one for each target, {targets.shape}: leave the mean to the task"
                )
        values, metric_weights = values.astype(scores.dtype), metric_weights.astype(scores.dtype)
        means[name] = Mean((values * metric_weights).sum(), metric_weights.sum())
    return means
