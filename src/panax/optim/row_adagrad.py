"""Adagrad for tables with a number for each number of a row, as `torch.optim.Adagrad` has it."""

import dataclasses

import jax
import jax.numpy as jnp

from ..core.protocols import Axes
from .optimizer import check_epsilon
from .rows import RowMean, RowOptimizer, RowState, check_not_negative


@dataclasses.dataclass(frozen=True, kw_only=True)
class RowAdagrad(RowOptimizer):
    """Adagrad of the rows that a step touches: as many numbers are kept as the table has.

    Equals `torch.optim.Adagrad` with sparse gradients. `RowWiseAdagrad` keeps one number a row in their place.

    Attributes:
        epsilon: Added to the root of the sum of squares.
        weight_decay: Decoupled, of rows when they are touched.

    Source: Adaptive Subgradient Methods (JMLR 12, 2011), the diagonal form.
    """

    epsilon: float = 1e-10
    weight_decay: float = 0.0

    def __post_init__(self) -> None:
        check_not_negative(weight_decay=self.weight_decay)
        check_epsilon(self.epsilon, "table_optimizer")

    def keeps(self, axes: Axes) -> dict[str, Axes]:
        return {"sum": axes}

    def step(
        self, rows: jax.Array, state: RowState, gradients: jax.Array, rate: jax.Array, updates: jax.Array, mean: RowMean
    ) -> tuple[jax.Array, RowState]:
        total = state["sum"] + jnp.square(gradients)
        if self.weight_decay:
            rows = rows * (1 - rate * self.weight_decay)
        return rows - rate * gradients / (jnp.sqrt(total) + self.epsilon), {"sum": total}
