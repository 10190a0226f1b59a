"""`Optimizer`: settings from which a transformation is built for given parameters; and those that run an optax chain."""

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
from ..core.protocols import Axes
from ..core.selecting import LayerParameters
from ..core.validated import Validated
from .decay import decay_mask
from .per_layer import Scope, on_each_layer
from .schedule import OwnSchedule, Schedule
from .state_axes import optimizer_state_axes
from .transformation import Transformation


@dataclasses.dataclass(frozen=True, kw_only=True)
class Optimizer(Validated, abc.ABC):
    """Settings of an optimizer.

    Attributes:
        schedule: The learning rate over the run.
    """

    schedule: Schedule | OwnSchedule = Schedule()  # noqa: RUF009

    @classmethod
    def hint_for(cls, value: Any) -> str | None:
        """What to write where something else is given in an optimizer's place; None where that is not known."""
        if callable(getattr(value, "init", None)) and callable(getattr(value, "update", None)):
            return "wrap the optax transformation: Optax(transformation=...)"
        if hasattr(value, "param_groups"):
            return "convert the PyTorch optimizer: panax.adapters.torch_optimizers.from_torch(...)"
        return "write AdamW(...), or another of panax.optim" if isinstance(value, str) else None

    @abc.abstractmethod
    def build(
        self,
        axes: Mapping[str, Axes],
        num_steps: int,
        layers: LayerParameters = MappingProxyType({}),
        meanings: Mapping[str, Axes] | None = None,
    ) -> Transformation:
        """The transformation for parameters with these names and logical axes, in a run of `num_steps`.

        Args:
            axes: By which parameters are placed.
            layers: Where each layer's parameters are stacked, for settings of single layers.
            meanings: The logical axes that say what each parameter is: a matrix, an embedding, a norm or a bias; None: `axes`.

        Raises:
            RecipeError: It has nothing to do for these parameters.
        """

    def for_batch(self, rows: int) -> "Optimizer":
        """This optimizer with the learning rate for batches of so many rows; itself where it has no rule for that."""
        schedule = self.schedule.for_batch(rows)
        return self if schedule is self.schedule else dataclasses.replace(self, schedule=schedule)

    def learning_rate(self, num_steps: int) -> optax.Schedule:
        """Step to learning rate."""
        return self.schedule.build(num_steps)

    def reported_rate(self, num_steps: int) -> optax.Schedule | None:
        """What is logged as the learning rate; None where the optimizer has one of its own that it does not tell."""
        return self.learning_rate(num_steps)


def check_epsilon(epsilon: float, optimizer: str = "optimizer", *, least: float = math.nextafter(0, 1)) -> None:
    """Refuse an epsilon with which a parameter whose gradient is 0 is divided by 0.

    Raises:
        RecipeError: It is below the least one.
    """
    if not least <= epsilon < math.inf:
        raise RecipeError(
            f"{optimizer}.epsilon={epsilon}; expected a positive number, such as 1e-8: a parameter without a gradient has the "
            f"update 0 / 0"
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Chained(Optimizer):
    """An optimizer that is a chain of optax's over whole arrays, which XLA splits."""

    scope: ClassVar[Scope]

    @abc.abstractmethod
    def chain(self, learning_rate: optax.Schedule, decay: Any) -> optax.GradientTransformation:
        """The transformation from averaged gradients to what is added to the parameters.

        Args:
            decay: An optax mask, true where weight decay applies.
        """

    def build(
        self,
        axes: Mapping[str, Axes],
        num_steps: int,
        layers: LayerParameters = MappingProxyType({}),
        meanings: Mapping[str, Axes] | None = None,
    ) -> Transformation:
        kinds = axes if meanings is None else meanings
        chain = on_each_layer(self.chain(self.learning_rate(num_steps), decay_mask(kinds)), kinds, self.scope)
        init, update = _in_its_own_ways(chain)
        takes_loss = isinstance(chain, optax.GradientTransformationExtraArgs)
        return Transformation(init, update, optimizer_state_axes, takes_loss=takes_loss)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Optax(Chained):
    """Any optax transformation, learning rate and decay included; it sees every layer unstacked.

    One that asks for the loss (`value`) is given the batch's, as `optax.contrib.reduce_on_plateau` is.

    Attributes:
        transformation: For example `optax.lamb(1e-3)`.
        of_schedule: Whether `transformation` leaves the learning rate to `schedule`, as `optax.scale_by_lion()` does.
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


def _in_its_own_ways(inner: optax.GradientTransformation) -> optax.GradientTransformation:
    """Run optax's code under the promotion rules that it is written for, whatever stricter ones are set."""

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
                    f"Optax(transformation=...): {asks[1].partition('.')[0]} asks for {asks[2]}, and a step here "
                    "computes the loss "
                    f"once and gives its `value` alone; take a transformation that does without a line search, such as optax.adam"
                ) from error

    return optax.GradientTransformation(init, update)
