"""Elementwise optimizers: an element's update depends on its own history only, so they need no
communication."""

import dataclasses

import jax
import jax.numpy as jnp

from ...core.errors import RecipeError
from ..moments import MEAN, Moments, adamw_step, check_decay_rates
from ..optimizer import check_epsilon
from ..parameter import Parameter
from ..sharded.shard import ParameterShard
from ..sharded.sharded_optimizer import ShardedOptimizer, StateSpec, UpdateInputs


@dataclasses.dataclass(frozen=True, kw_only=True)
class AdamW(ShardedOptimizer):
    """Adam with decoupled weight decay (arXiv:1711.05101)."""

    steps_as_adam = True

    b1: float = 0.9
    b2: float = 0.95
    epsilon: float = 1e-8
    weight_decay: float = 0.1

    def __post_init__(self) -> None:
        super().__post_init__()
        check_decay_rates(b1=self.b1, b2=self.b2)
        check_epsilon(self.epsilon, least=0.0)

    def state_specs(self, parameter: Parameter) -> dict[str, StateSpec]:
        return Moments.state_specs(parameter)

    def step(self, shard: ParameterShard, inputs: UpdateInputs) -> tuple[jax.Array, dict[str, jax.Array]]:
        return adamw_step(inputs, self.b1, self.b2, self.epsilon)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Lion(ShardedOptimizer):
    """Lion: the sign of an interpolated momentum (arXiv:2302.06675), with half of AdamW's state.

    Use a learning rate 3 to 10 times smaller than AdamW's, and a weight decay larger by the same factor.
    """

    steps_as_adam = True

    b1: float = 0.9
    b2: float = 0.99
    weight_decay: float = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_decay_rates(b1=self.b1, b2=self.b2)

    def state_specs(self, parameter: Parameter) -> dict[str, StateSpec]:
        return {MEAN: StateSpec.like(parameter)}

    def step(self, shard: ParameterShard, inputs: UpdateInputs) -> tuple[jax.Array, dict[str, jax.Array]]:
        gradient, mean = inputs.gradient, inputs.state[MEAN].astype(inputs.gradient.dtype)
        direction = jnp.sign(self.b1 * mean + (1 - self.b1) * gradient)
        return (
            -inputs.rate * (direction + inputs.decay * inputs.value),
            {MEAN: self.b2 * mean + (1 - self.b2) * gradient},
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sgd(ShardedOptimizer):
    """Stochastic gradient descent with momentum, optionally Nesterov's; weight decay is added to the
    gradient."""

    momentum: float = 0.0
    nesterov: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        check_decay_rates(momentum=self.momentum)
        if self.nesterov and not self.momentum:
            raise RecipeError(
                "optimizer.nesterov has no effect with momentum=0; set optimizer.momentum, for example to 0.9"
            )

    def state_specs(self, parameter: Parameter) -> dict[str, StateSpec]:
        return {MEAN: StateSpec.like(parameter)} if self.momentum else {}

    def step(self, shard: ParameterShard, inputs: UpdateInputs) -> tuple[jax.Array, dict[str, jax.Array]]:
        gradient = inputs.gradient + inputs.decay * inputs.value
        if not self.momentum:
            return -inputs.rate * gradient, {}
        running = gradient + self.momentum * inputs.state[MEAN].astype(gradient.dtype)
        direction = gradient + self.momentum * running if self.nesterov else running
        return -inputs.rate * direction, {MEAN: running}
