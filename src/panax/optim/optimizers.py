"""Optimizers as frozen settings that build an optax chain for a given tree of parameters.

Every one sees gradients that are already averaged and clipped, and each layer's own array. A new one is a dataclass with a
`schedule`, a `scope` and a `chain`; any `optax.GradientTransformation` is taken as it is by `Optax`.
"""

import abc
import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar

import jax
import optax

from ..core.errors import RecipeError
from ..core.protocols import Axes
from ..core.validated import Validated
from .decay import decay_mask
from .per_layer import Scope, on_each_layer
from .schedule import OwnSchedule, Schedule


def _in_its_own_ways(inner: optax.GradientTransformation) -> optax.GradientTransformation:
    """Run optax's code under the promotion rules that it is written for, whatever stricter ones are set."""

    def init(params: Any) -> Any:
        with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
            return inner.init(params)

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
            return inner.update(updates, state, params)

    return optax.GradientTransformation(init, update)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Optimizer(Validated, abc.ABC):
    """Settings of an optimizer."""

    schedule: Schedule | OwnSchedule = Schedule()  # noqa: RUF009

    scope: ClassVar[Scope]

    @classmethod
    def hint_for(cls, value: Any) -> str | None:
        """What to write where something else is given in an optimizer's place; None where that is not known."""
        if callable(getattr(value, "init", None)) and callable(getattr(value, "update", None)):
            return "wrap the optax transformation: Optax(transformation=...)"
        if hasattr(value, "param_groups"):
            return "convert the PyTorch optimizer: panax.adapters.from_torch(...)"
        return "write AdamW(...), or another of panax.optim" if isinstance(value, str) else None

    @abc.abstractmethod
    def chain(self, learning_rate: optax.Schedule, decay: Any) -> optax.GradientTransformation:
        """The transformation from averaged gradients to what is added to the parameters.

        Args:
            decay: An optax mask, true where weight decay applies.
        """

    def build(self, axes: Mapping[str, Axes], num_steps: int) -> optax.GradientTransformation:
        """The transformation for parameters with these names and logical axes, in a run of `num_steps`."""
        return _in_its_own_ways(
            on_each_layer(self.chain(self.learning_rate(num_steps), decay_mask(axes)), axes, self.scope)
        )

    def learning_rate(self, num_steps: int) -> optax.Schedule:
        """Step to learning rate."""
        return self.schedule.build(num_steps)

    def reported_rate(self, num_steps: int) -> optax.Schedule | None:
        """What is logged as the learning rate; None where the optimizer has one of its own that it does not tell."""
        return self.learning_rate(num_steps)


@dataclasses.dataclass(frozen=True, kw_only=True)
class AdamW(Optimizer):
    """Adam with decoupled weight decay (arXiv:1711.05101).

    Attributes:
        weight_decay: Times the learning rate; applied to weights and embeddings, never to norms or biases.
    """

    b1: float = 0.9
    b2: float = 0.95
    epsilon: float = 1e-8
    weight_decay: float = 0.1

    scope: ClassVar[Scope] = "element"

    def chain(self, learning_rate: optax.Schedule, decay: Any) -> optax.GradientTransformation:
        return optax.adamw(
            learning_rate, b1=self.b1, b2=self.b2, eps=self.epsilon, weight_decay=self.weight_decay, mask=decay
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Adafactor(Optimizer):
    """Adafactor (arXiv:1804.04235): second moments kept as a row and a column.

    Attributes:
        minimum_factored: A matrix is factored when its second largest dimension is at least this.
    """

    minimum_factored: int = 128
    decay_rate: float = 0.8
    clipping: float = 1.0
    weight_decay: float = 0.0

    scope: ClassVar[Scope] = "array"

    def chain(self, learning_rate: optax.Schedule, decay: Any) -> optax.GradientTransformation:
        return optax.adafactor(
            learning_rate,
            min_dim_size_to_factor=self.minimum_factored,
            decay_rate=self.decay_rate,
            clipping_threshold=self.clipping,
            weight_decay_rate=self.weight_decay or None,
            weight_decay_mask=decay,
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sgd(Optimizer):
    """Stochastic gradient descent with momentum, optionally Nesterov's."""

    momentum: float = 0.0
    nesterov: bool = False
    weight_decay: float = 0.0

    scope: ClassVar[Scope] = "element"

    def __post_init__(self) -> None:
        if self.nesterov and not self.momentum:
            raise RecipeError(
                "optimizer.nesterov has no effect with momentum=0; set optimizer.momentum, for example to 0.9"
            )

    def chain(self, learning_rate: optax.Schedule, decay: Any) -> optax.GradientTransformation:
        return optax.chain(
            optax.add_decayed_weights(self.weight_decay, decay) if self.weight_decay else optax.identity(),
            optax.sgd(learning_rate, self.momentum or None, self.nesterov),
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Optax(Optimizer):
    """Any optax transformation, learning rate and decay included; it sees every layer unstacked.

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
