"""Adafactor: second moments of matrices factored into a row and a column (arXiv:1804.04235)."""

import dataclasses

import jax
import jax.numpy as jnp

from ...core.errors import RecipeError
from ..moments import SQUARE
from ..parameter import Parameter
from ..sharded.shard import ParameterShard
from ..sharded.sharded_optimizer import ShardedOptimizer, StateSpec, UpdateInputs

ROW, COLUMN = "square_row", "square_column"
FLOOR = 1e-30
"""Added to squares, so that the root of a zero gradient can be divided by."""
MIN_SCALE = 1e-3
"""Minimum scale of a parameter, so that one initialized with zeros moves."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Adafactor(ShardedOptimizer):
    """Adafactor: mean squares over rows and over columns, a clipped update, and a step relative to the
    parameter's scale.

    Attributes:
        minimum_factored: A matrix is factored if its second largest dimension is at least this.
        decay_rate: After n updates, the decay rate of the mean squares is 1 - n ** -decay_rate.
        clipping: Maximum root mean square of an array's update; larger updates are scaled down.
        weight_decay: Not multiplied by the learning rate.
    """

    minimum_factored: int = 128
    decay_rate: float = 0.8
    clipping: float = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 < self.decay_rate <= 1:
            raise RecipeError(f"optimizer.decay_rate={self.decay_rate}; expected a power in (0, 1]")
        if self.minimum_factored < 1:
            raise RecipeError(f"optimizer.minimum_factored={self.minimum_factored}; expected a size of at least 1")
        if self.clipping <= 0:
            raise RecipeError(f"optimizer.clipping={self.clipping}; expected a positive root mean square")

    def factored_dims(self, parameter: Parameter) -> tuple[int, int] | None:
        """Return the dimensions of the row and of the column: an array's second largest, and its largest;
        None if not factored."""
        if len(parameter.array_dims) < 2:
            return None
        *_, second, largest = sorted(parameter.array_dims, key=lambda dim: (parameter.shape[dim], dim))
        return (second, largest) if parameter.shape[second] >= self.minimum_factored else None

    def state_specs(self, parameter: Parameter) -> dict[str, StateSpec]:
        dims = self.factored_dims(parameter)
        if dims is None:
            return {SQUARE: StateSpec.like(parameter, signed=False)}
        row, column = dims
        return {ROW: _mean_spec(parameter, column), COLUMN: _mean_spec(parameter, row)}

    def step(self, shard: ParameterShard, inputs: UpdateInputs) -> tuple[jax.Array, dict[str, jax.Array]]:
        squares = jnp.square(inputs.gradient) + FLOOR
        decay = 1 - jnp.power(inputs.num_updates + 1, -self.decay_rate)
        dims = self.factored_dims(shard.parameter)
        if dims is None:
            after = {SQUARE: _moved(inputs.state[SQUARE], squares, decay)}
            update = inputs.gradient * jax.lax.rsqrt(after[SQUARE])
        else:
            row, column = dims
            after = {
                ROW: _moved(inputs.state[ROW], shard.mean(squares, (column,)), decay),
                COLUMN: _moved(inputs.state[COLUMN], shard.mean(squares, (row,)), decay),
            }
            along = jax.lax.rsqrt(after[ROW] / shard.mean(after[ROW], (row,)))
            update = inputs.gradient * along * jax.lax.rsqrt(after[COLUMN])
        update = update / jnp.maximum(1, _size(shard, update) / self.clipping)
        scale = jnp.maximum(_size(shard, inputs.value), MIN_SCALE)
        return -(inputs.rate * update * scale + inputs.decay * inputs.value), after


def _mean_spec(parameter: Parameter, reduced_dim: int) -> StateSpec:
    """Return the spec of a mean over one dimension, which then has size 1."""
    shape = tuple(1 if dim == reduced_dim else size for dim, size in enumerate(parameter.shape))
    axes = tuple(None if dim == reduced_dim else axis for dim, axis in enumerate(parameter.axes))
    return StateSpec(shape, parameter.dtype, axes, signed=False)


def _moved(old: jax.Array, new: jax.Array, decay: jax.Array) -> jax.Array:
    return decay * old.astype(new.dtype) + (1 - decay) * new


def _size(shard: ParameterShard, x: jax.Array) -> jax.Array:
    """Compute the root mean square of each array."""
    return jnp.sqrt(shard.mean(jnp.square(x)))
