"""Common parts of optimizers that update weights as matrices and use AdamW for all other parameters."""

import dataclasses
from collections.abc import Mapping

import jax
import jax.numpy as jnp

from ...core.errors import RecipeError
from ...core.protocols import Axes
from ..moments import Moments, adamw_step, check_decay_rates
from ..optimizer import check_epsilon
from ..parameter import Parameter, check_excluded, matrix_dims
from ..sharded.owner_shards import OwnedArray
from ..sharded.shard import ParameterShard
from ..sharded.sharded_optimizer import ShardedOptimizer, StateSpec, UpdateInputs

NON_MATRIX_AXES = ("vocab", "position", "class", "tap", "router", "patch_row", "patch_column")
"""Logical axes of tables, filters, and a model's first and last layers."""

STATISTIC = "statistic"
"""The logical axis of each side of a per-matrix statistic."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class MatrixOptimizer(ShardedOptimizer):
    """An optimizer of matrices that map one space to another, with AdamW for all other parameters.

    Attributes:
        excluded: Logical axes; a weight with any of them is updated by AdamW.
        b1: AdamW's decay rate of the mean; `b2` and `epsilon` are AdamW's too.
    """

    excluded: tuple[str, ...] = NON_MATRIX_AXES
    weight_decay: float = 0.1
    b1: float = 0.9
    b2: float = 0.95
    epsilon: float = 1e-8

    def __post_init__(self) -> None:
        super().__post_init__()
        check_decay_rates(b1=self.b1, b2=self.b2)
        check_epsilon(self.epsilon, least=0.0)

    def check(self, axes: Mapping[str, Axes]) -> None:
        check_excluded(self.excluded, axes)
        if not any(map(self.is_matrix, axes.values())):
            raise RecipeError(
                f"{type(self).__name__} found no eligible matrix: of the {len(axes)} parameters that train, all matrices "
                f"have one of the excluded axes ({', '.join(self.excluded)}); use AdamW, or "
                f"shorten optimizer.excluded"
            )

    def is_matrix(self, axes: Axes) -> bool:
        """Return True if a parameter with these logical axes is updated as a matrix."""
        return matrix_dims(axes) is not None and not any(axis in self.excluded for axis in axes)

    def state_specs(self, parameter: Parameter) -> dict[str, StateSpec]:
        return (
            self.matrix_state_specs(parameter)
            if self.is_matrix(parameter.semantic_axes)
            else Moments.state_specs(parameter)
        )

    def step_all(
        self, shards: Mapping[str, ParameterShard], inputs: Mapping[str, UpdateInputs]
    ) -> dict[str, tuple[jax.Array, dict[str, jax.Array]]]:
        matrices = {name: shard for name, shard in shards.items() if self.is_matrix(shard.parameter.semantic_axes)}
        others = {name: self.step(shard, inputs[name]) for name, shard in shards.items() if name not in matrices}
        return others | self.update_matrices(matrices, inputs)

    def step(self, shard: ParameterShard, inputs: UpdateInputs) -> tuple[jax.Array, dict[str, jax.Array]]:
        """Compute AdamW's update."""
        return adamw_step(inputs, self.b1, self.b2, self.epsilon)

    def matrix_state_specs(self, parameter: Parameter) -> dict[str, StateSpec]:
        """Return the state specs of a parameter that is updated as a matrix, as `state_specs` does."""
        raise NotImplementedError

    def update_matrices(
        self, shards: Mapping[str, ParameterShard], inputs: Mapping[str, UpdateInputs]
    ) -> dict[str, tuple[jax.Array, dict[str, jax.Array]]]:
        """Compute the updates of the matrix parameters in `shards`, as `step_all` does; `inputs` also holds the
        other parameters."""
        raise NotImplementedError


def matrix_statistic(parameter: Parameter, shape: tuple[int, ...]) -> StateSpec:
    """Return the spec of a float32 array per matrix, stored with its last two dimensions sharded over the
    devices that divide them."""
    stack = tuple(parameter.shape[dim] for dim in parameter.stack_dims)
    axes = (*(parameter.axes[dim] for dim in parameter.stack_dims), *(None,) * (len(shape) - 2), STATISTIC, STATISTIC)
    return StateSpec((*stack, *shape), "float32", axes, moment=False)


def statistic_shards(shard: ParameterShard, specs: Mapping[str, StateSpec]) -> dict[str, OwnedArray]:
    """Describe the per-matrix statistics of a parameter as arrays to send to the matrices' owners."""
    name = shard.parameter.name
    return {
        kind: OwnedArray.of_statistic(ParameterShard.of(Parameter(name, one.shape, one.dtype, one.axes)))
        for kind, one in specs.items()
        if STATISTIC in one.axes
    }


def matmul_float32(a: jax.Array, b: jax.Array) -> jax.Array:
    """Multiply float32 matrices at full precision, regardless of the platform's default."""
    return jnp.matmul(a, b, precision=jax.lax.Precision.HIGHEST)
