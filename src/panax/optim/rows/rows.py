"""Optimizers for embedding tables, which update only the rows that a step touches, and their state.

Rows that no example uses keep their value and state: weight decay and moments apply only to touched rows.
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

from ...core.errors import RecipeError
from ...core.protocols import Axes
from ...core.validation import Validated
from ..moments import check_decay_rates
from ..optimizer import check_epsilon
from ..schedule import CustomSchedule, Schedule

RowState = Mapping[str, Array]
"""The state of each row, by name: a scalar per row, or one value per element."""

RowMean = Callable[[Float[Array, "touched row_width"]], Float[Array, " touched"]]


@dataclasses.dataclass(frozen=True, kw_only=True)
class RowOptimizer(Validated, abc.ABC):
    """Settings of an optimizer for embedding tables.

    Attributes:
        schedule: The learning-rate schedule; constant by default, since a row is updated at irregular steps.
    """

    schedule: Schedule | CustomSchedule = Schedule(peak=0.01, decay="constant")  # noqa: RUF009

    takes_means: ClassVar[bool] = False
    """True if `step` calls `mean`, which reduces over devices if columns are sharded."""

    @abc.abstractmethod
    def state_axes(self, axes: Axes) -> dict[str, Axes]:
        """Return the logical axes of each state array of a table, by name: the row axis alone, or row and
        width.

        Args:
            axes: The table's logical axes.
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
        """Update the touched rows and their state.

        Args:
            gradients: The gradient of each row, summed over all its uses in the batch.
            rate: The learning rate.
            updates: Number of updates including this one: 1 in the first.
            mean: Averages over each row's elements, across devices if columns are sharded.
        """

    def learning_rate(self, num_steps: int) -> optax.Schedule:
        """Build the function from step to learning rate."""
        return self.schedule.build(num_steps)

    def scale_to_batch(self, rows: int) -> "RowOptimizer":
        """Return this optimizer with its learning rate scaled to batches of `rows` rows; itself if no scaling
        rule is set."""
        schedule = self.schedule.scale_to_batch(rows)
        return self if schedule is self.schedule else dataclasses.replace(self, schedule=schedule)

    def init_state(self, shape: tuple[int, ...], axes: Axes) -> dict[str, Array]:
        """Create the initial float32 state of a table of `shape`."""
        return {name: jnp.zeros(shape[: len(kept)], jnp.float32) for name, kept in self.state_axes(axes).items()}


@dataclasses.dataclass(frozen=True, kw_only=True)
class RowWiseAdagrad(RowOptimizer):
    """Adagrad with one accumulator per row: the sum of the mean squared gradients.

    Equals FBGEMM's EXACT_ROWWISE_ADAGRAD: `exact`, since duplicates in a batch are one update with their
    summed gradient.

    Attributes:
        epsilon: Added to the square root of the accumulator.
        weight_decay: Applied to a row when it is touched.
        decay: l2: the decay is added to the gradient, and so enters the accumulator. decoupled: rows shrink
            by rate x decay.

    Source: FBGEMM, optimizers "exact_row_wise_adagrad".
    """

    takes_means = True

    epsilon: float = 1e-8
    weight_decay: float = 0.0
    decay: Literal["l2", "decoupled"] = "l2"

    def __post_init__(self) -> None:
        check_not_negative(weight_decay=self.weight_decay)
        check_epsilon(self.epsilon, "embedding_optimizer")

    def state_axes(self, axes: Axes) -> dict[str, Axes]:
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
    """Adam that updates the moments of touched rows only; bias correction counts all updates.

    Equals `torch.optim.SparseAdam`.

    Attributes:
        weight_decay: Decoupled; applied to a row when it is touched.
    """

    schedule: Schedule | CustomSchedule = Schedule(peak=1e-3, decay="constant")  # noqa: RUF009
    b1: float = 0.9
    b2: float = 0.999
    epsilon: float = 1e-8
    weight_decay: float = 0.0

    def __post_init__(self) -> None:
        check_decay_rates(b1=self.b1, b2=self.b2)
        check_not_negative(weight_decay=self.weight_decay)
        check_epsilon(self.epsilon, "embedding_optimizer")

    def state_axes(self, axes: Axes) -> dict[str, Axes]:
        return {"mean": axes, "square": axes}

    def step(
        self, rows: jax.Array, state: RowState, gradients: jax.Array, rate: jax.Array, updates: jax.Array, mean: RowMean
    ) -> tuple[jax.Array, RowState]:
        first = self.b1 * state["mean"] + (1 - self.b1) * gradients
        square = self.b2 * state["square"] + (1 - self.b2) * jnp.square(gradients)
        count = updates.astype(jnp.float32)
        # 1 - b ** count by expm1: computed directly, float32 loses most digits in the first updates.
        of_mean, of_square = (-jnp.expm1(count * math.log(b)) if b else 1.0 for b in (self.b1, self.b2))
        size = rate * jnp.sqrt(of_square) / of_mean
        if self.weight_decay:
            rows = rows * (1 - rate * self.weight_decay)
        return rows - size * first / (jnp.sqrt(square) + self.epsilon), {"mean": first, "square": square}


@dataclasses.dataclass(frozen=True, kw_only=True)
class RowSgd(RowOptimizer):
    """Stochastic gradient descent without momentum; weight decay is added to the gradient of touched rows."""

    weight_decay: float = 0.0

    def __post_init__(self) -> None:
        check_not_negative(weight_decay=self.weight_decay)

    def state_axes(self, axes: Axes) -> dict[str, Axes]:
        return {}

    def step(
        self, rows: jax.Array, state: RowState, gradients: jax.Array, rate: jax.Array, updates: jax.Array, mean: RowMean
    ) -> tuple[jax.Array, RowState]:
        return rows - rate * (gradients + self.weight_decay * rows), {}


def check_not_negative(**settings: float) -> None:
    """Check that no setting is negative.

    Raises:
        RecipeError: A setting is below zero; the message names it.
    """
    for name, value in settings.items():
        if value < 0:
            raise RecipeError(f"embedding_optimizer.{name}={value}; expected 0 or more")
