"""`Optimizer`: settings that build a transformation for given parameters; base class of Panax's and optax's
optimizers."""

import abc
import dataclasses
import math
import re
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, ClassVar

import jax
import optax

from ..core.errors import RecipeError
from ..core.params.selection import LayerParameters
from ..core.protocols import Axes
from ..core.validation import Validated
from .decay import decay_mask
from .per_layer import Scope, apply_per_layer
from .schedule import CustomSchedule, Schedule
from .state_axes import optimizer_state_axes
from .transformation import Transformation


@dataclasses.dataclass(frozen=True, kw_only=True)
class Optimizer(Validated, abc.ABC):
    """Settings of an optimizer.

    Attributes:
        schedule: The learning-rate schedule.
    """

    schedule: Schedule | CustomSchedule = Schedule()  # noqa: RUF009

    @classmethod
    def hint_for(cls, value: Any) -> str | None:
        """Return a suggestion for a value passed where an optimizer is expected; None if there is none."""
        if callable(getattr(value, "init", None)) and callable(getattr(value, "update", None)):
            return "wrap the optax transformation: Optax(transformation=...)"
        if hasattr(value, "param_groups"):
            return "convert the PyTorch optimizer: panax.adapters.torch.optimizers.from_torch(...)"
        return "write AdamW(...), or another of panax.optim" if isinstance(value, str) else None

    @abc.abstractmethod
    def build(
        self,
        axes: Mapping[str, Axes],
        num_steps: int,
        layers: LayerParameters = MappingProxyType({}),
        meanings: Mapping[str, Axes] | None = None,
    ) -> Transformation:
        """Build the transformation for the named parameters, for a run of `num_steps`.

        Args:
            axes: Parameter name to the logical axes that determine its sharding.
            layers: Index of the stacked layers' parameters, for per-layer settings.
            meanings: Parameter name to the logical axes that determine its role: matrix, embedding, norm or
                bias; None: `axes`.

        Raises:
            RecipeError: The optimizer does not apply to any of these parameters.
        """

    def scale_to_batch(self, rows: int) -> "Optimizer":
        """Return this optimizer with its learning rate scaled to batches of `rows` rows; itself if no scaling
        rule is set."""
        schedule = self.schedule.scale_to_batch(rows)
        return self if schedule is self.schedule else dataclasses.replace(self, schedule=schedule)

    def learning_rate(self, num_steps: int) -> optax.Schedule:
        """Build the function from step to learning rate."""
        return self.schedule.build(num_steps)

    def reported_rate(self, num_steps: int) -> optax.Schedule | None:
        """Build the learning-rate function to log; None if the rate is internal to the optimizer."""
        return self.learning_rate(num_steps)


def check_epsilon(epsilon: float, optimizer: str = "optimizer", *, least: float = math.nextafter(0, 1)) -> None:
    """Check that `epsilon` is at least `least`, so that a zero gradient never gives 0 / 0.

    Raises:
        RecipeError: `epsilon` is smaller than `least` or not finite.
    """
    if not least <= epsilon < math.inf:
        raise RecipeError(
            f"{optimizer}.epsilon={epsilon}; expected a positive number, such as 1e-8: a parameter without a gradient has the "
            f"update 0 / 0"
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Chained(Optimizer):
    """An optimizer built from an optax chain over global arrays, which XLA partitions."""

    scope: ClassVar[Scope]

    @abc.abstractmethod
    def chain(self, learning_rate: optax.Schedule, decay: Any) -> optax.GradientTransformation:
        """Build the optax transformation from averaged gradients to updates.

        Args:
            decay: An optax mask, True where weight decay applies.
        """

    def build(
        self,
        axes: Mapping[str, Axes],
        num_steps: int,
        layers: LayerParameters = MappingProxyType({}),
        meanings: Mapping[str, Axes] | None = None,
    ) -> Transformation:
        kinds = axes if meanings is None else meanings
        chain = apply_per_layer(self.chain(self.learning_rate(num_steps), decay_mask(kinds)), kinds, self.scope)
        init, update = _with_standard_promotion(chain)
        takes_loss = isinstance(chain, optax.GradientTransformationExtraArgs)
        return Transformation(init, update, optimizer_state_axes, takes_loss=takes_loss)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Optax(Chained):
    """Any optax transformation, with its own learning rate and weight decay; it sees every layer unstacked.

    A transformation that takes the loss as `value`, such as `optax.contrib.reduce_on_plateau`, receives the
    batch's loss.

    Attributes:
        transformation: For example `optax.lamb(1e-3)`.
        of_schedule: True if the learning rate of `schedule` is applied after `transformation`, as
            `optax.scale_by_lion()` needs.
    """

    transformation: optax.GradientTransformation
    of_schedule: bool = False

    scope: ClassVar[Scope] = "tree"

    def __post_init__(self) -> None:
        if not self.of_schedule and self.schedule != Schedule():
            raise RecipeError(
                "optimizer.schedule has no effect on Optax(transformation=...), which brings its own learning rate; set "
                "of_schedule=True for a transformation that leaves it to the schedule, as optax.scale_by_adam() does"
            )

    def reported_rate(self, num_steps: int) -> optax.Schedule | None:
        return self.learning_rate(num_steps) if self.of_schedule else None

    def chain(self, learning_rate: optax.Schedule, decay: Any) -> optax.GradientTransformation:
        if not self.of_schedule:
            return self.transformation
        return optax.chain(self.transformation, optax.scale_by_learning_rate(learning_rate))


_ASKING = re.compile(r"([\w.<>]+)\(\) missing \d+ required keyword-only arguments?: (.+)")


def _with_standard_promotion(inner: optax.GradientTransformation) -> optax.GradientTransformation:
    """Run optax's code under JAX's standard promotion rules, even if stricter ones are set."""

    def init(params: Any) -> Any:
        with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
            return inner.init(params)

    def update(updates: Any, state: Any, params: Any = None, **more: Any) -> tuple[Any, Any]:
        with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
            try:
                return inner.update(updates, state, params, **more)
            except TypeError as error:
                asks = _ASKING.search(str(error))
                if asks is None:
                    raise
                raise RecipeError(
                    f"Optax(transformation=...): {asks[1].partition('.')[0]} needs {asks[2]}, and a step here "
                    "computes the loss "
                    f"once and gives only its `value`; use a transformation without a line search, such as optax.adam"
                ) from error

    return optax.GradientTransformation(init, update)
