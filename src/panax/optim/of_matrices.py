"""What optimizers share that work on weights as matrices, and leave all other parameters to AdamW."""

import dataclasses
from collections.abc import Mapping

import jax
import jax.numpy as jnp

from ..core.errors import RecipeError
from ..core.protocols import Axes
from .moments import Moments, adamw_step, check_decay_rates
from .on_shards import ShardedOptimizer, StateSpec, UpdateInputs
from .optimizer import check_epsilon
from .owners import OwnedArray
from .parameter import Parameter, check_excluded, matrix_of
from .shard import ParameterShard

NO_MATRICES = ("vocab", "position", "class", "tap", "router", "patch_row", "patch_column")
"""Logical axes whose weights are tables, filters, or a model's first and last layers."""

STATISTIC = "statistic"
"""The logical axis of a side of what is kept beside a matrix."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class MatrixOptimizer(ShardedOptimizer):
    """An optimizer of weights between two spaces, and AdamW for all other parameters.

    Attributes:
        excluded: Logical axes; a weight that has one of them is AdamW's.
        b1: AdamW's; `b2` and `epsilon` too.
    """

    excluded: tuple[str, ...] = NO_MATRICES
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
        if not any(map(self.takes, axes.values())):
            raise RecipeError(
                f"{type(self).__name__} has no matrix to work on: of the {len(axes)} parameters that train, those that map one "
                f"space to another have one of the axes {', '.join(self.excluded)}, which are excluded; take AdamW, or leave "
                f"axes out of optimizer.excluded"
            )

    def takes(self, axes: Axes) -> bool:
        """Whether a parameter with these logical axes is taken as a matrix."""
        return matrix_of(axes) is not None and not any(axis in self.excluded for axis in axes)

    def keeps(self, parameter: Parameter) -> dict[str, StateSpec]:
        return self.keeps_of_matrix(parameter) if self.takes(parameter.kinds) else Moments.keeps(parameter)

    def steps(
        self, shards: Mapping[str, ParameterShard], taken: Mapping[str, UpdateInputs]
    ) -> dict[str, tuple[jax.Array, dict[str, jax.Array]]]:
        matrices = {name: shard for name, shard in shards.items() if self.takes(shard.parameter.kinds)}
        others = {name: self.step(shard, taken[name]) for name, shard in shards.items() if name not in matrices}
        return others | self.steps_of_matrices(matrices, taken)

    def step(self, shard: ParameterShard, taken: UpdateInputs) -> tuple[jax.Array, dict[str, jax.Array]]:
        """AdamW's."""
        return adamw_step(taken, self.b1, self.b2, self.epsilon)

    def keeps_of_matrix(self, parameter: Parameter) -> dict[str, StateSpec]:
        """As `keeps`, of a parameter that is taken."""
        raise NotImplementedError

    def steps_of_matrices(
        self, shards: Mapping[str, ParameterShard], taken: Mapping[str, UpdateInputs]
    ) -> dict[str, tuple[jax.Array, dict[str, jax.Array]]]:
        """As `steps`, of the parameters that are taken; `taken` has the others, too."""
        raise NotImplementedError


def matrix_statistic(parameter: Parameter, shape: tuple[int, ...]) -> StateSpec:
    """An array in float32 for each matrix of a parameter, whose last two dimensions rest split over the devices that divide
    them."""
    stack = tuple(parameter.shape[dim] for dim in parameter.copies)
    axes = (*(parameter.axes[dim] for dim in parameter.copies), *(None,) * (len(shape) - 2), STATISTIC, STATISTIC)
    return StateSpec((*stack, *shape), "float32", axes, moment=False)


def statistic_shards(shard: ParameterShard, kept: Mapping[str, StateSpec]) -> dict[str, OwnedArray]:
    """What is kept beside a parameter's matrices, as parts that go to owners with them."""
    name = shard.parameter.name
    return {
        kind: OwnedArray.beside(ParameterShard.of(Parameter(name, one.shape, one.dtype, one.axes)))
        for kind, one in kept.items()
        if STATISTIC in one.axes
    }


def product(a: jax.Array, b: jax.Array) -> jax.Array:
    """Of matrices in float32, multiplied in full whatever the platform's usual precision is."""
    return jnp.matmul(a, b, precision=jax.lax.Precision.HIGHEST)
