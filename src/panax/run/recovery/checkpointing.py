"""Schedule of saves: a checkpoint, or a copy in memory, after the steps at which one is due."""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

from ...checkpoint import CheckpointConfig, Checkpointer, MemoryTier
from ...core import TrainState
from ...job.heartbeat import heartbeat
from ..folder.base_model import NamedBase
from ..parts.run_part import RunPart, RunProgress, is_step_due
from ..parts.run_start import RunStart
from ..reporting.report import RunReporter
from ..versions import VERSIONS, jax_versions
from .best_evaluation import BEST, BestEvaluation
from .rollback import RollbackController


class CheckpointSchedule(RunPart):
    """Schedule of saves in the two tiers of one run: the store and the memory of hosts.

    Attributes:
        stored_step: The step with a checkpoint in the store or on its way there; None before the first.
        best: The best evaluation so far; None before the first.
    """

    def __init__(
        self,
        config: CheckpointConfig,
        checkpointer: Checkpointer,
        memory: MemoryTier | None,
        rollback: RollbackController,
        report: RunReporter,
        base: NamedBase | None = None,
    ):
        self._config, self._checkpointer, self._memory = config, checkpointer, memory
        self._rollback, self._report, self._base = rollback, report, base
        self.stored_step: int | None = None
        self.best: BestEvaluation | None = None
        self._best_is_saved = True
        self._is_late = False

    def begin(self, run: RunProgress, start: RunStart) -> None:
        """Continue from a state with a best evaluation that is in the store or was reported as unsaved."""
        self.stored_step = start.stored_step
        self.best, self._best_is_saved, self._is_late = start.best, True, False

    def after_evaluation(self, run: RunProgress) -> None:
        """Record an evaluation, and request a save if it is the best so far.

        A loss that is not finite does not count: it is never the best, and hides no other.
        """
        loss = run.evaluation.get("loss", math.nan)
        if not math.isfinite(loss) or (self.best is not None and not loss < self.best.loss):
            return
        self.best, self._best_is_saved = BestEvaluation(float(loss), run.step), False
        # Without regular saves the user has requested none before the end.
        run.must_save |= self._config.keep_best > 0 and self._config.every > 0

    def describe_lost_best(self) -> str | None:
        """Return a warning about the best evaluation, if no checkpoint has its parameters, but one should."""
        if self.best is None or self._best_is_saved or not self._config.keep_best:
            return None
        if not self._config.every:
            reason = "checkpoint.every=0 saves at the end alone: set it to 1 or more to keep the best evaluation"
        else:
            reason = f"its save was skipped or has failed (checkpoint.when_busy={self._config.when_busy!r})"
        return f"warning: the best evaluation, loss {self.best.loss:.4g} at step {self.best.step}, has no checkpoint: {reason}"

    def after_step(self, run: RunProgress) -> None:
        """Save if a save is due or requested; the last step's checkpoint is left to `save_last`.

        While the item of the data is not used up, a save waits: a run that is resumed would draw the next one.
        """
        stores = self._is_late or run.must_save or is_step_due(self._config.every, run.step)
        self._is_late = stores and run.batches_left > 0
        if run.batches_left:
            return
        copies = self._memory is not None and is_step_due(self._config.memory.every, run.step)
        if not run.takes_steps or not (stores or copies) or not self._rollback.wait_for_devices(self._report):
            return
        # Only a sound state is saved: the step's scalars are read and checked first.
        self._report.flush()
        with self._report.clock.measure("save"), self._report.ledger.measure("checkpoint wait"):
            if stores:
                self._save(run, must=False)
            # A copy replaces the one before, which a rollback may need; the state has not changed since.
            if self._memory is not None and copies and self._rollback.pending_step is None:
                self._memory.save(self._stored(run), run.step, run.to_host())
        self._report.ledger.record_step(run.step, saved=True)

    def save_last(self, run: RunProgress) -> str:
        """Save the state, unless the store has it, wait until it is committed, and return its address.

        Raises:
            CheckpointError: The state could not be saved.
        """
        if self.stored_step != run.step:
            self._save(run, must=True)
        self._checkpointer.finish()
        return self._checkpointer.url(run.step)

    def _save(self, run: RunProgress, must: bool) -> None:
        host, loss = run.to_host(), run.evaluation.get("loss")
        if self._checkpointer.save(
            self._stored(run), run.step, host, loss, must=must, back_to=self._rollback.needed_step
        ):
            self.stored_step = run.step
            if self.best is not None and self.best.step == run.step:
                self._best_is_saved = True
            heartbeat().report_saved(run.step)

    def _stored(self, run: RunProgress) -> TrainState:
        """Return the state without the weights that a checkpoint names instead."""
        return run.state if self._base is None else self._base.leave_out(run.state)

    def to_host(self, run: RunProgress) -> Mapping[str, Any]:
        """Return the versions that save, the best evaluation so far, and the base model."""
        best = {} if self.best is None else {BEST: dataclasses.asdict(self.best)}
        base = {} if self._base is None else self._base.to_host()
        return {VERSIONS: jax_versions(), **best, **base}
