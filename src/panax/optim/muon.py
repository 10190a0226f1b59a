"""Muon: momentum with each matrix made orthogonal (Jordan et al. 2024; scaled as in arXiv:2502.16982)."""

import dataclasses
import math
from collections.abc import Mapping
from typing import Literal

import jax
import jax.numpy as jnp

from ..core.errors import RecipeError
from .moments import MEAN, check_decay_rates
from .of_matrices import MatrixOptimizer
from .on_shards import StateSpec, UpdateInputs
from .owners import OwnedArray, map_to_owners
from .parameter import Parameter
from .shard import ParameterShard

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
"""Of the quintic iteration; chosen by its authors for the steepest slope at zero."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Muon(MatrixOptimizer):
    """Muon on weights between two spaces, AdamW on all other parameters.

    Attributes:
        iterations: Of Newton and Schulz, from the momentum to something like its nearest orthogonal matrix.
        dtype: Of these iterations, and of what is sent for them.
        scale: What an update is multiplied with. adamw: 0.2 times the root of the larger dimension, for an update of about
            AdamW's root mean square, so that a rate and a decay tuned for AdamW fit. spectral: the root of columns over rows
            where that is above 1, as in the first publication; rows are what goes in.
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

    def keeps_of_matrix(self, parameter: Parameter) -> dict[str, StateSpec]:
        return {MEAN: StateSpec.like(parameter)}

    def steps_of_matrices(
        self, shards: Mapping[str, ParameterShard], taken: Mapping[str, UpdateInputs]
    ) -> dict[str, tuple[jax.Array, dict[str, jax.Array]]]:
        found: dict[str, tuple[jax.Array, dict[str, jax.Array]]] = {}
        running, directions = {}, {}
        for name in shards:
            gradient, mean = taken[name].gradient, taken[name].kept[MEAN]
            running[name] = self.momentum * mean.astype(gradient.dtype) + (1 - self.momentum) * gradient
            ahead = self.momentum * running[name] + (1 - self.momentum) * gradient if self.nesterov else running[name]
            # In units of its norm, so that bfloat16 holds it and zeros stay zeros.
            directions[name] = [_unit(shards[name], ahead).astype(self.dtype)]
        parts = {name: [OwnedArray.of(shard)] for name, shard in shards.items()}
        orthogonal = map_to_owners(self._orthogonalised, parts, directions, parts)
        for name, shard in shards.items():
            now = taken[name]
            update = orthogonal[name][0].astype(now.gradient.dtype) * self._scale(shard.parameter)
            found[name] = -now.rate * (update + now.decay * now.value), {MEAN: running[name]}
        return found

    def _scale(self, parameter: Parameter) -> float:
        rows, columns = (math.prod(parameter.shape[dim] for dim in dims) for dims in parameter.matrix or ((), ()))
        return 0.2 * math.sqrt(max(rows, columns)) if self.scale == "adamw" else math.sqrt(max(1, columns / rows))

    def _orthogonalised(self, matrices: jax.Array) -> list[jax.Array]:
        """Newton and Schulz's iteration on matrices of a norm of at most 1, with no more rows than columns."""
        a, b, c = COEFFICIENTS

        def iterate(x: jax.Array, _: None) -> tuple[jax.Array, None]:
            gram = x @ x.mT
            return a * x + (b * gram + c * (gram @ gram)) @ x, None

        return [jax.lax.scan(iterate, matrices, None, self.iterations)[0]]


def _unit(shard: ParameterShard, x: jax.Array) -> jax.Array:
    """Each own array divided by its norm; zeros where it is zero."""
    norm = shard.norm(x)
    return x / jnp.where(norm > 0, norm, 1)
