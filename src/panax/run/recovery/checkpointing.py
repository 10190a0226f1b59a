"""Schedule of saves: a checkpoint, or a copy in memory, after the steps at which one is due."""

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any

from ...checkpoint import CheckpointConfig, Checkpointer, MemoryTier
from ...core import Position, TrainState
from ...job.heartbeat import heartbeat
from ..versions import VERSIONS, jax_versions

BEST = "best"
"""Name under which a checkpoint stores the best evaluation of its run so far."""


@dataclasses.dataclass(frozen=True)
class BestEvaluation:
    """The evaluation with the lowest held-out loss so far, and its step."""

    loss: float
    step: int

    @classmethod
    def of(cls, saved: Any) -> "BestEvaluation | None":
        """Read the value in a checkpoint; None if it is of an earlier version, or of another form."""
        loss, step = (saved.get("loss"), saved.get("step")) if isinstance(saved, Mapping) else (None, None)
        if not isinstance(loss, int | float) or not math.isfinite(loss) or not isinstance(step, int):
            return None
        return cls(float(loss), step)


def is_step_due(every: int, number: int) -> bool:
    """Return True if something done every `every` steps is due after step `number`; never for 0."""
    return every > 0 and number % every == 0


@dataclasses.dataclass
class CheckpointSchedule:
    """Schedule of saves in the two tiers of one run: the store and the memory of hosts.

    Attributes:
        stored_step: The step with a checkpoint in the store or on its way there; None before the first.
        hook_state: Called before each save: returns the state of the run's hooks for the checkpoint.
        data_progress: Called before each save: returns the record of skipped batches for a checkpoint of a step.
        rollback_step: The step to which the run may soon roll back; None if the last update was applied.
        verified_step: The step to which the run rolls back from a corrupted step; None if steps are not
            checked.
        best: The best evaluation so far; None before the first.
        best_is_saved: True if a save of the best evaluation's step was started.
    """

    config: CheckpointConfig
    checkpointer: Checkpointer
    memory: MemoryTier | None
    stored_step: int | None = None
    hook_state: Callable[[], Mapping[str, Any]] = dict
    data_progress: Callable[[int], Mapping[str, Any]] = lambda step: {}
    rollback_step: int | None = None
    verified_step: int | None = None
    best: BestEvaluation | None = None
    best_is_saved: bool = True

    def begin(self, best: BestEvaluation | None) -> None:
        """Continue from a state with this best evaluation, which is in the store or was reported as unsaved."""
        self.best, self.best_is_saved = best, True

    def record_evaluation(self, number: int, evaluation: Mapping[str, float]) -> bool:
        """Record an evaluation of step `number`; return True if it must be saved, as the best so far.

        A loss that is not finite does not count: it is never the best, and hides no other.
        """
        loss = evaluation.get("loss", math.nan)
        if not math.isfinite(loss) or (self.best is not None and not loss < self.best.loss):
            return False
        self.best, self.best_is_saved = BestEvaluation(float(loss), number), False
        # Without regular saves the user has requested none before the end.
        return self.config.keep_best > 0 and self.config.every > 0

    def describe_lost_best(self) -> str | None:
        """Return a warning about the best evaluation, if no checkpoint has its parameters, but one should."""
        if self.best is None or self.best_is_saved or not self.config.keep_best:
            return None
        if not self.config.every:
            reason = "checkpoint.every=0 saves at the end alone: set it to 1 or more to keep the best evaluation"
        else:
            reason = f"its save was skipped or has failed (checkpoint.when_busy={self.config.when_busy!r})"
        return f"warning: the best evaluation, loss {self.best.loss:.4g} at step {self.best.step}, has no checkpoint: {reason}"

    def is_due(self, number: int, *, requested: bool = False) -> bool:
        """Return True if anything is to be saved after step `number`."""
        copies = self.memory is not None and is_step_due(self.config.memory.every, number)
        return requested or copies or is_step_due(self.config.every, number)

    def after_step(
        self,
        state: TrainState,
        number: int,
        position: Position | None,
        evaluation: Mapping[str, float],
        *,
        requested: bool = False,
    ) -> None:
        """Save if a save is due or `requested`; the last step's checkpoint is left to `at_end`."""
        if requested or is_step_due(self.config.every, number):
            self._save(state, number, position, evaluation, must=False)
        # A copy replaces the one before, which a rollback may need; the state has not changed since.
        if self.memory is not None and is_step_due(self.config.memory.every, number) and self.rollback_step is None:
            self.memory.save(state, number, self._host(number, position))

    def at_end(self, state: TrainState, number: int, position: Position | None, evaluation: Mapping[str, float]) -> str:
        """Save the last state, unless the store has it, wait until it is committed, and return its address.

        Raises:
            CheckpointError: The state could not be saved.
        """
        if self.stored_step != number:
            self._save(state, number, position, evaluation, must=True)
        self.checkpointer.finish()
        return self.checkpointer.url(number)

    def _save(
        self, state: Any, number: int, position: Position | None, evaluation: Mapping[str, float], must: bool
    ) -> None:
        host, loss = self._host(number, position), evaluation.get("loss")
        back_to = min((step for step in (self.rollback_step, self.verified_step) if step is not None), default=None)
        if self.checkpointer.save(state, number, host, loss, must=must, back_to=back_to):
            self.stored_step = number
            if self.best is not None and self.best.step == number:
                self.best_is_saved = True
            heartbeat().report_saved(number)

    def _host(self, number: int, position: Position | None) -> dict[str, Any]:
        host: dict[str, Any] = {"data": None if position is None else dict(position), **self.data_progress(number)}
        host[VERSIONS] = jax_versions()
        if self.best is not None:
            host[BEST] = dataclasses.asdict(self.best)
        of_hooks = dict(self.hook_state())
        return {**host, "hooks": of_hooks} if of_hooks else host
