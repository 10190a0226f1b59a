"""Optimizers for tables: they see the rows that a step touches, and those rows' state, and nothing else.

A row that no example asks for is left as it is, its state too: nothing decays that is not touched.
"""

import abc
import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import ClassVar, Literal

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float, Int

from ..core.errors import RecipeError
from ..core.protocols import Axes
from ..core.validated import Validated
from .moments import check_decay_rates
from .optimizer import check_epsilon
from .schedule import OwnSchedule, Schedule

RowState = Mapping[str, Array]
"""What an optimizer keeps of each row by its name: a number, or as many as the row has."""

RowMean = Callable[[Float[Array, "touched row_width"]], Float[Array, " touched"]]


@dataclasses.dataclass(frozen=True, kw_only=True)
class RowOptimizer(Validated, abc.ABC):
    """Settings of an optimizer for tables.

    Attributes:
        schedule: The learning rate over the run; constant by default, since a row's own steps come when they come.
    """

    schedule: Schedule | OwnSchedule = Schedule(peak=0.01, decay="constant")  # noqa: RUF009

    takes_means: ClassVar[bool] = False
    """Whether `step` calls `mean`, which adds up over devices where columns are split."""

    @abc.abstractmethod
    def keeps(self, axes: Axes) -> dict[str, Axes]:
        """The logical axes of what is kept of a table, by name: the rows alone, or rows and width.

        Args:
            axes: The table's.
        """

    @abc.abstractmethod
    def step(
        self,
        rows: Float[Array, "touched row_width"],
        state: RowState,
        gradients: Float[Array, "touched row_width"],
        rate: Float[Array, ""],
        updates: Int[Array, ""],
        mean: RowMean,
    ) -> tuple[Float[Array, "touched row_width"], RowState]:
        """The rows and their state after an update.

        Args:
            gradients: Each row's, summed over all that asked for it.
            rate: The learning rate.
            updates: Applied so far, this one included: 1 in the first.
            mean: Of each row's numbers, of which a device may hold a part.
        """

    def learning_rate(self, num_steps: int) -> optax.Schedule:
        """Step to learning rate."""
        return self.schedule.build(num_steps)

    def for_batch(self, rows: int) -> "RowOptimizer":
        """This optimizer with the learning rate for batches of so many rows; itself where it has no rule for that."""
        schedule = self.schedule.for_batch(rows)
        return self if schedule is self.schedule else dataclasses.replace(self, schedule=schedule)

    def first_state(self, shape: tuple[int, ...], axes: Axes) -> dict[str, Array]:
        """What is kept before the first update, in float32, of a table of `shape`."""
        return {name: jnp.zeros(shape[: len(kept)], jnp.float32) for name, kept in self.keeps(axes).items()}


@dataclasses.dataclass(frozen=True, kw_only=True)
class RowWiseAdagrad(RowOptimizer):
    """Adagrad with one number a row: the sum of the means of its squared gradients.

    Equals FBGEMM's EXACT_ROWWISE_ADAGRAD: `exact`, since duplicates in a batch are one update with their summed gradient.

    Attributes:
        epsilon: Added to the root of that number.
        weight_decay: Of rows when they are touched.
        decay: l2: the decay is a part of the gradient, and counts in its square. decoupled: rows shrink by rate x decay.

    Source: FBGEMM, optimizers "exact_row_wise_adagrad".
    """

    takes_means = True

    epsilon: float = 1e-8
    weight_decay: float = 0.0
    decay: Literal["l2", "decoupled"] = "l2"

    def __post_init__(self) -> None:
        check_not_negative(weight_decay=self.weight_decay)
        check_epsilon(self.epsilon, "table_optimizer")

    def keeps(self, axes: Axes) -> dict[str, Axes]:
        return {"sum": axes[:1]}

    def step(
        self, rows: jax.Array, state: RowState, gradients: jax.Array, rate: jax.Array, updates: jax.Array, mean: RowMean
    ) -> tuple[jax.Array, RowState]:
        if self.weight_decay and self.decay == "l2":
            gradients = gradients + self.weight_decay * rows
        total = state["sum"] + mean(jnp.square(gradients))
        if self.weight_decay and self.decay == "decoupled":
            rows = rows * (1 - rate * self.weight_decay)
        step = rate / (jnp.sqrt(total) + self.epsilon)
        return rows - step[:, None] * gradients, {"sum": total}


@dataclasses.dataclass(frozen=True, kw_only=True)
class LazyAdam(RowOptimizer):
    """Adam whose moments move only where a row is touched; the correction of their bias counts all updates.

    Equals `torch.optim.SparseAdam`.

    Attributes:
        weight_decay: Decoupled, of rows when they are touched.
    """

    schedule: Schedule | OwnSchedule = Schedule(peak=1e-3, decay="constant")  # noqa: RUF009
    b1: float = 0.9
    b2: float = 0.999
    epsilon: float = 1e-8
    weight_decay: float = 0.0

    def __post_init__(self) -> None:
        check_decay_rates(b1=self.b1, b2=self.b2)
        check_not_negative(weight_decay=self.weight_decay)
        check_epsilon(self.epsilon, "table_optimizer")

    def keeps(self, axes: Axes) -> dict[str, Axes]:
        return {"mean": axes, "square": axes}

    def step(
        self, rows: jax.Array, state: RowState, gradients: jax.Array, rate: jax.Array, updates: jax.Array, mean: RowMean
    ) -> tuple[jax.Array, RowState]:
        first = self.b1 * state["mean"] + (1 - self.b1) * gradients
        square = self.b2 * state["square"] + (1 - self.b2) * jnp.square(gradients)
        count = updates.astype(jnp.float32)
        # 1 - b ** count, of which float32 would lose most digits in the first updates.
        of_mean, of_square = (-jnp.expm1(count * math.log(b)) if b else 1.0 for b in (self.b1, self.b2))
        size = rate * jnp.sqrt(of_square) / of_mean
        if self.weight_decay:
            rows = rows * (1 - rate * self.weight_decay)
        return rows - size * first / (jnp.sqrt(square) + self.epsilon), {"mean": first, "square": square}


@dataclasses.dataclass(frozen=True, kw_only=True)
class RowSgd(RowOptimizer):
    """Stochastic gradient descent without momentum; weight decay is a part of the gradient of a row that is touched."""

    weight_decay: float = 0.0

    def __post_init__(self) -> None:
        check_not_negative(weight_decay=self.weight_decay)

    def keeps(self, axes: Axes) -> dict[str, Axes]:
        return {}

    def step(
        self, rows: jax.Array, state: RowState, gradients: jax.Array, rate: jax.Array, updates: jax.Array, mean: RowMean
    ) -> tuple[jax.Array, RowState]:
        return rows - rate * (gradients + self.weight_decay * rows), {}


def check_not_negative(**settings: float) -> None:
    """
    Raises:
        RecipeError: One is below zero; names it.
    """
    for name, value in settings.items():
        if value < 0:
            raise RecipeError(f"table_optimizer.{name}={value}; expected 0 or more")
