"""Optimizers that scale each layer's update to the layer's norm, for very large batches.

LARS (arXiv:1708.03888) scales the gradient, LAMB (arXiv:1904.00962) Adam's update. Norms are taken over each
layer's, and each expert's, global array, however it is sharded.
"""

import dataclasses
from collections.abc import Mapping
from typing import ClassVar

import jax
import jax.numpy as jnp

from ...core.errors import RecipeError
from ...core.protocols import Axes
from ..decay import uses_weight_decay
from ..moments import MEAN, Moments, check_decay_rates
from ..optimizer import check_epsilon
from ..parameter import Parameter, check_excluded
from ..sharded.shard import ParameterShard
from ..sharded.sharded_optimizer import ShardedOptimizer, StateSpec, UpdateInputs


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Layerwise(ShardedOptimizer):
    """Base class of optimizers that scale updates by per-layer norms.

    Attributes:
        excluded: Logical axes; a parameter with any of them is updated without a trust ratio.
        vectors: True to apply the trust ratio to norms and biases too.
    """

    excluded: tuple[str, ...] = ()
    vectors: bool = False

    instead: ClassVar[str] = "AdamW"

    def check(self, axes: Mapping[str, Axes]) -> None:
        check_excluded(self.excluded, axes)
        if not any(map(self.uses_trust_ratio, axes.values())):
            what = f"axes {', '.join(self.excluded)}" if self.excluded else "norms and biases"
            raise RecipeError(
                f"{type(self).__name__} scales no parameter: all {len(axes)} that train are {what}, which are excluded; set "
                f"optimizer.vectors to True, shorten optimizer.excluded, or use {self.instead}"
            )

    def uses_trust_ratio(self, axes: Axes) -> bool:
        """Return True if updates of a parameter with these logical axes are scaled by a trust ratio."""
        return (self.vectors or uses_weight_decay(axes)) and not any(axis in self.excluded for axis in axes)


def trust_ratio(shard: ParameterShard, value: jax.Array, update: jax.Array, epsilon: float = 0.0) -> jax.Array:
    """Compute the norm of each array over that of its update; 1 if either is 0."""
    weights, updates = shard.norm(value), shard.norm(update)
    return jnp.where((weights > 0) & (updates > 0), weights / (updates + epsilon), 1)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Lamb(_Layerwise):
    """LAMB (arXiv:1904.00962): Adam's update, scaled to the norm of each layer's weights.

    Attributes:
        max_ratio: Upper bound of the trust ratio; None for no bound.
    """

    b1: float = 0.9
    b2: float = 0.999
    epsilon: float = 1e-6
    weight_decay: float = 0.01
    max_ratio: float | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        check_decay_rates(b1=self.b1, b2=self.b2)
        check_epsilon(self.epsilon, least=0.0)
        if self.max_ratio is not None and self.max_ratio <= 0:
            raise RecipeError(f"optimizer.max_ratio={self.max_ratio}; expected a positive ratio, such as 10, or None")

    def state_specs(self, parameter: Parameter) -> dict[str, StateSpec]:
        return Moments.state_specs(parameter)

    def step(self, shard: ParameterShard, inputs: UpdateInputs) -> tuple[jax.Array, dict[str, jax.Array]]:
        moments = Moments.update(inputs, self.b1, self.b2)
        direction = moments.direction(inputs, self.b1, self.b2, self.epsilon) + inputs.decay * inputs.value
        if self.uses_trust_ratio(shard.parameter.semantic_axes):
            ratio = trust_ratio(shard, inputs.value, direction)
            direction = direction * (ratio if self.max_ratio is None else jnp.minimum(ratio, self.max_ratio))
        return -inputs.rate * direction, moments.arrays


@dataclasses.dataclass(frozen=True, kw_only=True)
class Lars(_Layerwise):
    """LARS (arXiv:1708.03888): momentum of gradients that are scaled to the norm of each layer's weights.

    Attributes:
        trust: Norm of a layer's update, relative to that of its weights, at a learning rate of 1.
        epsilon: Added to the norm of the gradient.
    """

    momentum: float = 0.9
    nesterov: bool = False
    trust: float = 0.001
    epsilon: float = 0.0
    weight_decay: float = 1e-4

    instead: ClassVar[str] = "Sgd"
    epsilon_may_be_zero: ClassVar[bool] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        check_decay_rates(momentum=self.momentum)
        if self.epsilon < 0:
            raise RecipeError(f"optimizer.epsilon={self.epsilon}; expected 0 or more")
        if self.trust <= 0:
            raise RecipeError(f"optimizer.trust={self.trust}; expected a positive share, such as 0.001")

    def state_specs(self, parameter: Parameter) -> dict[str, StateSpec]:
        return {MEAN: StateSpec.like(parameter)}

    def step(self, shard: ParameterShard, inputs: UpdateInputs) -> tuple[jax.Array, dict[str, jax.Array]]:
        update = inputs.gradient + inputs.decay * inputs.value
        if self.uses_trust_ratio(shard.parameter.semantic_axes):
            update = update * trust_ratio(shard, self.trust * inputs.value, update, self.epsilon)
        update = -inputs.rate * update
        running = update + self.momentum * inputs.state[MEAN].astype(update.dtype)
        return (update + self.momentum * running if self.nesterov else running), {MEAN: running}
