"""Adagrad for embedding tables with one accumulator per element, as in `torch.optim.Adagrad`."""

import dataclasses

import jax
import jax.numpy as jnp

from ...core.protocols import Axes
from ..optimizer import check_epsilon
from .rows import RowMean, RowOptimizer, RowState, check_not_negative


@dataclasses.dataclass(frozen=True, kw_only=True)
class RowAdagrad(RowOptimizer):
    """Adagrad for touched rows, with state of the table's size.

    Equals `torch.optim.Adagrad` with sparse gradients. `RowWiseAdagrad` stores one value per row instead.

    Attributes:
        epsilon: Added to the square root of the sum of squares.
        weight_decay: Decoupled; applied to a row when it is touched.

    Source: Adaptive Subgradient Methods (JMLR 12, 2011), the diagonal form.
    """

    epsilon: float = 1e-10
    weight_decay: float = 0.0

    def __post_init__(self) -> None:
        check_not_negative(weight_decay=self.weight_decay)
        check_epsilon(self.epsilon, "embedding_optimizer")

    def state_axes(self, axes: Axes) -> dict[str, Axes]:
        return {"sum": axes}

    def step(
        self, rows: jax.Array, state: RowState, gradients: jax.Array, rate: jax.Array, updates: jax.Array, mean: RowMean
    ) -> tuple[jax.Array, RowState]:
        total = state["sum"] + jnp.square(gradients)
        if self.weight_decay:
            rows = rows * (1 - rate * self.weight_decay)
        return rows - rate * gradients / (jnp.sqrt(total) + self.epsilon), {"sum": total}
