"""`StepProtocol`: the interface of a step, compiled or not."""

from collections.abc import Callable, Mapping
from typing import Any, Protocol, runtime_checkable

import jax

from ...core import TrainState
from ..batch_transfer import Sender
from ..program import Program
from ..update import Scalars


@runtime_checkable
class StepProtocol(Sender, Protocol):
    """The interface that the training loop requires of a step, compiled or not."""

    program: Program
    shardings: Any

    def init(self, seed: int, initial_values: tuple[Any, Any] | None = None) -> TrainState: ...

    def init_params(self, seed: int, mask: Any) -> Any: ...

    def storage_shardings(self, tree: Any, axes: Any) -> Any: ...

    def __call__(self, state: TrainState, batch: Mapping[str, jax.Array]) -> tuple[TrainState, Scalars]: ...

    def evaluate(self, state: TrainState, batch: Mapping[str, jax.Array]) -> Any: ...

    def summarize(
        self, state: TrainState, batch: Mapping[str, jax.Array], summary: Callable[[Any, Any], Any]
    ) -> Any: ...
