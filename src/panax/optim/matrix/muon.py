"""Muon: momentum orthogonalized per matrix (Jordan et al. 2024; scaled as in arXiv:2502.16982)."""

import dataclasses
import math
from collections.abc import Mapping
from typing import Literal

import jax
import jax.numpy as jnp

from ...core.errors import RecipeError
from ..moments import MEAN, check_decay_rates
from ..parameter import Parameter
from ..sharded.owner_shards import OwnedArray, map_to_owners
from ..sharded.shard import ParameterShard
from ..sharded.sharded_optimizer import StateSpec, UpdateInputs
from .matrix_optimizer import MatrixOptimizer

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
"""Coefficients of the quintic Newton-Schulz iteration, which its authors chose for the steepest slope at
zero."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Muon(MatrixOptimizer):
    """Muon for matrices that map one space to another, AdamW for all other parameters.

    Attributes:
        iterations: Number of Newton-Schulz iterations that bring the momentum close to its nearest orthogonal
            matrix.
        dtype: Dtype of these iterations and of their communication.
        scale: Factor applied to updates. adamw: 0.2 times the square root of the larger dimension, so that
            the update's root mean square is about AdamW's, and a learning rate and weight decay tuned for
            AdamW fit. spectral: the square root of columns over rows if that exceeds 1, as in the first
            publication; rows are the input.
    """

    momentum: float = 0.95
    nesterov: bool = True
    iterations: int = 5
    dtype: Literal["bfloat16", "float32"] = "bfloat16"
    scale: Literal["adamw", "spectral"] = "adamw"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_decay_rates(momentum=self.momentum)
        if self.iterations < 1:
            raise RecipeError(f"optimizer.iterations={self.iterations}; expected 1 or more, usually 5")

    def matrix_state_specs(self, parameter: Parameter) -> dict[str, StateSpec]:
        return {MEAN: StateSpec.like(parameter)}

    def update_matrices(
        self, shards: Mapping[str, ParameterShard], inputs: Mapping[str, UpdateInputs]
    ) -> dict[str, tuple[jax.Array, dict[str, jax.Array]]]:
        updates: dict[str, tuple[jax.Array, dict[str, jax.Array]]] = {}
        running, directions = {}, {}
        for name in shards:
            gradient, mean = inputs[name].gradient, inputs[name].state[MEAN]
            running[name] = self.momentum * mean.astype(gradient.dtype) + (1 - self.momentum) * gradient
            ahead = self.momentum * running[name] + (1 - self.momentum) * gradient if self.nesterov else running[name]
            # Normalized, so that bfloat16 can represent it; zeros stay zeros.
            directions[name] = [_unit(shards[name], ahead).astype(self.dtype)]
        parts = {name: [OwnedArray.of(shard)] for name, shard in shards.items()}
        orthogonal = map_to_owners(self._orthogonalize, parts, directions, parts)
        for name, shard in shards.items():
            entry = inputs[name]
            update = orthogonal[name][0].astype(entry.gradient.dtype) * self._scale(shard.parameter)
            updates[name] = -entry.rate * (update + entry.decay * entry.value), {MEAN: running[name]}
        return updates

    def _scale(self, parameter: Parameter) -> float:
        rows, columns = (math.prod(parameter.shape[dim] for dim in dims) for dims in parameter.matrix or ((), ()))
        return 0.2 * math.sqrt(max(rows, columns)) if self.scale == "adamw" else math.sqrt(max(1, columns / rows))

    def _orthogonalize(self, matrices: jax.Array) -> list[jax.Array]:
        """Run the Newton-Schulz iteration on matrices of norm at most 1, with at most as many rows as
        columns."""
        a, b, c = COEFFICIENTS

        def iterate(x: jax.Array, _: None) -> tuple[jax.Array, None]:
            gram = x @ x.mT
            return a * x + (b * gram + c * (gram @ gram)) @ x, None

        return [jax.lax.scan(iterate, matrices, None, self.iterations)[0]]


def _unit(shard: ParameterShard, x: jax.Array) -> jax.Array:
    """Divide each array by its norm; a zero array stays zero."""
    norm = shard.norm(x)
    return x / jnp.where(norm > 0, norm, 1)
