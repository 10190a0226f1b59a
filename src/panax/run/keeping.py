"""What the loop does so that nothing is lost: a checkpoint or a copy in memory after the steps where one is due."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from ..checkpoint import CheckpointConfig, Checkpointer, MemoryTier
from ..core import Position, TrainState


def due(every: int, number: int) -> bool:
    """Whether something done every so many steps is to be done after step `number`; never, for 0."""
    return every > 0 and number % every == 0


@dataclasses.dataclass
class Keeper:
    """The two tiers of one run.

    Attributes:
        stored: The step whose checkpoint is in the store, or on its way there; None before the first.
        of_hooks: Asked before each save: what a checkpoint keeps of the run's hooks.
    """

    config: CheckpointConfig
    checkpointer: Checkpointer
    memory: MemoryTier | None
    stored: int | None = None
    of_hooks: Callable[[], Mapping[str, Any]] = dict

    def is_due(self, number: int, *, asked: bool = False) -> bool:
        """Whether anything is kept after step `number`."""
        copies = self.memory is not None and due(self.config.memory.every, number)
        return asked or copies or due(self.config.every, number)

    def after_step(
        self,
        state: TrainState,
        number: int,
        position: Position | None,
        evaluation: Mapping[str, float],
        *,
        asked: bool = False,
    ) -> None:
        """Save what is due, or asked for; the last step's checkpoint is left to `at_end`."""
        if asked or due(self.config.every, number):
            self._save(state, number, position, evaluation, must=False)
        if self.memory is not None and due(self.config.memory.every, number):
            self.memory.save(state, number, self._host(position))

    def at_end(self, state: TrainState, number: int, position: Position | None, evaluation: Mapping[str, float]) -> str:
        """Save the last state, unless the store has it, and wait until it is committed; where it is.

        Raises:
            CheckpointError: It could not be saved.
        """
        if self.stored != number:
            self._save(state, number, position, evaluation, must=True)
        self.checkpointer.finish()
        return self.checkpointer.url(number)

    def _save(
        self, state: Any, number: int, position: Position | None, evaluation: Mapping[str, float], must: bool
    ) -> None:
        if self.checkpointer.save(state, number, self._host(position), evaluation.get("loss"), must=must):
            self.stored = number

    def _host(self, position: Position | None) -> dict[str, Any]:
        host: dict[str, Any] = {"data": None if position is None else dict(position)}
        of_hooks = dict(self.of_hooks())
        return {**host, "hooks": of_hooks} if of_hooks else host
