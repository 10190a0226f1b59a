"""What the loop does so that nothing is lost: a checkpoint or a copy in memory after the steps where one is due."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from ..checkpoint import CheckpointConfig, Checkpointer, MemoryTier
from ..core import Position, TrainState
from ..core.heartbeat import heartbeat
from .versions import VERSIONS, jax_versions


def due(every: int, number: int) -> bool:
    """Whether something done every so many steps is to be done after step `number`; never, for 0."""
    return every > 0 and number % every == 0


@dataclasses.dataclass
class Keeper:
    """The two tiers of one run.

    Attributes:
        stored: The step whose checkpoint is in the store, or on its way there; None before the first.
        of_hooks: Asked before each save: what a checkpoint keeps of the run's hooks.
        of_batches: Asked before each save: what a checkpoint of a step keeps of the batches that were left out.
        back_to: The step to which the run may soon go back; None where the last update was applied.
        verified: The step to which it goes back from a corrupted one; None where steps are not checked.
    """

    config: CheckpointConfig
    checkpointer: Checkpointer
    memory: MemoryTier | None
    stored: int | None = None
    of_hooks: Callable[[], Mapping[str, Any]] = dict
    of_batches: Callable[[int], Mapping[str, Any]] = lambda step: {}
    back_to: int | None = None
    verified: int | None = None

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
        # A copy takes the place of the one before, which may be needed; the state is that of before.
        if self.memory is not None and due(self.config.memory.every, number) and self.back_to is None:
            self.memory.save(state, number, self._host(number, position))

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
        host, loss = self._host(number, position), evaluation.get("loss")
        back_to = min((step for step in (self.back_to, self.verified) if step is not None), default=None)
        if self.checkpointer.save(state, number, host, loss, must=must, back_to=back_to):
            self.stored = number
            heartbeat().saved(number)

    def _host(self, number: int, position: Position | None) -> dict[str, Any]:
        host: dict[str, Any] = {"data": None if position is None else dict(position), **self.of_batches(number)}
        host[VERSIONS] = jax_versions()
        of_hooks = dict(self.of_hooks())
        return {**host, "hooks": of_hooks} if of_hooks else host
