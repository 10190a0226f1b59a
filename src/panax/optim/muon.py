"""Muon: momentum with each matrix made orthogonal (Jordan et al. 2024; scaled as in arXiv:2502.16982)."""

import dataclasses
import math
from collections.abc import Mapping
from typing import Literal

import jax
import jax.numpy as jnp

from ..core.errors import RecipeError
from ..core.protocols import Axes
from .moments import MEAN, Moments, adamw_step, check_decay_rates
from .on_shards import Kept, OnShards, Taken
from .owners import shared_out
from .parameter import Parameter, check_excluded, matrix_of
from .shard import Shard

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
"""Of the quintic iteration; chosen by its authors for the steepest slope at zero."""

NO_MATRICES = ("vocab", "position", "class", "tap", "router", "patch_row", "patch_column")
"""Logical axes whose weights are tables, filters, or a model's first and last layers."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Muon(OnShards):
    """Muon on weights between two spaces, AdamW on all other parameters.

    Attributes:
        iterations: Of Newton and Schulz, from the momentum to something like its nearest orthogonal matrix.
        dtype: Of these iterations, and of what is sent for them.
        scale: What an update is multiplied with. adamw: 0.2 times the root of the larger dimension, for an update of about
            AdamW's root mean square, so that a rate and a decay tuned for AdamW fit. spectral: the root of columns over rows
            where that is above 1, as in the first publication; rows are what goes in.
        excluded: Logical axes; a weight that has one of them is AdamW's.
        b1: AdamW's; `b2` and `epsilon` too.
    """

    momentum: float = 0.95
    nesterov: bool = True
    iterations: int = 5
    dtype: Literal["bfloat16", "float32"] = "bfloat16"
    scale: Literal["adamw", "spectral"] = "adamw"
    excluded: tuple[str, ...] = NO_MATRICES
    weight_decay: float = 0.1
    b1: float = 0.9
    b2: float = 0.95
    epsilon: float = 1e-8

    def __post_init__(self) -> None:
        super().__post_init__()
        check_decay_rates(momentum=self.momentum, b1=self.b1, b2=self.b2)
        if self.iterations < 1:
            raise RecipeError(f"optimizer.iterations={self.iterations}; expected 1 or more, usually 5")

    def check(self, axes: Mapping[str, Axes]) -> None:
        check_excluded(self.excluded, axes)
        if not any(map(self.orthogonal, axes.values())):
            raise RecipeError(
                f"Muon has no matrix to work on: of the {len(axes)} parameters that train, those that map one space to another "
                f"have one of the axes {', '.join(self.excluded)}, which are excluded; take AdamW, or leave axes out of "
                f"optimizer.excluded"
            )

    def orthogonal(self, axes: Axes) -> bool:
        """Whether a parameter with these logical axes is updated by an orthogonal matrix."""
        return matrix_of(axes) is not None and not any(axis in self.excluded for axis in axes)

    def keeps(self, parameter: Parameter) -> dict[str, Kept]:
        return {MEAN: Kept.like(parameter)} if self.orthogonal(parameter.axes) else Moments.keeps(parameter)

    def steps(
        self, shards: Mapping[str, Shard], taken: Mapping[str, Taken]
    ) -> dict[str, tuple[jax.Array, dict[str, jax.Array]]]:
        matrices = {name: shard for name, shard in shards.items() if self.orthogonal(shard.parameter.axes)}
        found = {name: self.step(shard, taken[name]) for name, shard in shards.items() if name not in matrices}
        running, directions = {}, {}
        for name in matrices:
            gradient, mean = taken[name].gradient, taken[name].kept[MEAN]
            running[name] = self.momentum * mean.astype(gradient.dtype) + (1 - self.momentum) * gradient
            ahead = self.momentum * running[name] + (1 - self.momentum) * gradient if self.nesterov else running[name]
            # In units of its norm, so that bfloat16 holds it and zeros stay zeros.
            directions[name] = _unit(shards[name], ahead).astype(self.dtype)
        orthogonal = shared_out(self._orthogonalised, matrices, directions)
        for name, shard in matrices.items():
            now = taken[name]
            update = orthogonal[name].astype(now.gradient.dtype) * self._scale(shard.parameter)
            found[name] = -now.rate * (update + now.decay * now.value), {MEAN: running[name]}
        return found

    def step(self, shard: Shard, taken: Taken) -> tuple[jax.Array, dict[str, jax.Array]]:
        """AdamW's."""
        return adamw_step(taken, self.b1, self.b2, self.epsilon)

    def _scale(self, parameter: Parameter) -> float:
        rows, columns = (math.prod(parameter.shape[dim] for dim in dims) for dims in parameter.matrix or ((), ()))
        return 0.2 * math.sqrt(max(rows, columns)) if self.scale == "adamw" else math.sqrt(max(1, columns / rows))

    def _orthogonalised(self, matrices: jax.Array) -> jax.Array:
        """Newton and Schulz's iteration on matrices of a norm of at most 1, with no more rows than columns."""
        a, b, c = COEFFICIENTS

        def iterate(x: jax.Array, _: None) -> tuple[jax.Array, None]:
            gram = x @ x.mT
            return a * x + (b * gram + c * (gram @ gram)) @ x, None

        return jax.lax.scan(iterate, matrices, None, self.iterations)[0]


def _unit(shard: Shard, x: jax.Array) -> jax.Array:
    """Each own array divided by its norm; zeros where it is zero."""
    norm = shard.norm(x)
    return x / jnp.where(norm > 0, norm, 1)
