"""Rollback from updates that can't be applied, inside the process: to the newest checkpoint before them,
without their batches.

A batch that is not finite, or a spike, is skipped by the step's guard. After `rollback.after` skipped updates
in a row the run rolls back to the newest whole state before the first of them, and continues without the
batches that were skipped; those before them are trained on again, with bitwise the same results. So if the
next updates are skipped as well, it was not those batches: the state has been bad since before, and rolling
back further to train on the same again would end in the same. The run then rolls back one checkpoint further,
and skips every batch since, as PaLM's training did (arXiv:2204.02311, section 5.1).

All processes read the same scalars, and decide by them at the same step. The skipped batches are recorded
alongside the checkpoints before any of these is removed, so that a run that is killed at any moment of it
continues as if it had not been.
"""

import dataclasses
import time
from collections.abc import Mapping
from typing import Any

from ...checkpoint import Checkpointer, MemoryTier, raise_on_all_processes
from ...core.errors import TrainingError
from ...job.agreement import is_process_zero
from ...job.heartbeat import heartbeat
from ..degraded_features import effective_verify_every
from ..opened_data import LogFn
from ..parts.phases import RunEvent
from ..parts.run_part import RunPart, RunProgress
from ..parts.run_start import RunStart
from ..preparation import PreparedRun
from ..reporting.report import RunReporter
from ..reporting.step_warnings import describe_skipped_updates
from ..start import restore_newest, start_fresh
from .skipped_batches import DataProgress, Rollback, matches_history, write_rollbacks


def with_trusted_step(start: RunStart, prepared: PreparedRun) -> RunStart:
    """Return a start with a trusted state, if steps are verified and none has been so far."""
    if start.progress.verified or not effective_verify_every(prepared.experiment.verify.every, prepared.step):
        return start
    return dataclasses.replace(start, progress=dataclasses.replace(start.progress, verified=start.step))


class RollbackController(RunPart):
    """The batches that a run has taken and skipped, and its rollbacks.

    Attributes:
        progress: Progress of the run in its data; `skipped` is up to the last step with scalars that were read.
        is_due: True if the run is to roll back, by the scalars read so far.
        pending_step: The step to which the run may soon roll back; None if the last update was applied.
    """

    def __init__(
        self,
        prepared: PreparedRun,
        start: RunStart,
        checkpointer: Checkpointer,
        memory: MemoryTier | None,
        say: LogFn,
    ):
        self.progress, self.is_due = start.progress, False
        self.pending_step: int | None = None
        self._prepared, self._checkpointer, self._memory, self._say = prepared, checkpointer, memory, say
        self._verifies = effective_verify_every(prepared.experiment.verify.every, prepared.step) > 0
        self._numbers: dict[int, int] = {}
        self._streak: tuple[int, ...] = ()
        self._first, self._why = 0, ""
        self._reached = {start.step: time.monotonic()}
        self._corrupted = ""

    def begin(self, run: RunProgress, start: RunStart) -> None:
        self.progress, self.pending_step = start.progress, None

    def after_step(self, run: RunProgress) -> None:
        """Record the batch of the step, with scalars that are not read yet; roll back if that is due.

        Decided here only, where every process has read the same scalars: a hook may read more in one of them.
        """
        self._numbers[run.step] = run.drawn
        self.progress = dataclasses.replace(self.progress, drawn=run.drawn)
        if self.is_due:
            run.handle(RunEvent.ROLLBACK_DUE)

    def to_host(self, run: RunProgress) -> Mapping[str, Any]:
        self._reached.setdefault(run.step, time.monotonic())
        return self.progress.to_host(run.step)

    @property
    def needed_step(self) -> int | None:
        """Return the step to which the run may still roll back: a checkpoint at or before it must stay; None if
        any may go."""
        verified = self.progress.verified if self._verifies else None
        return min((step for step in (self.pending_step, verified) if step is not None), default=None)

    @property
    def skipped_batches(self) -> frozenset[int]:
        """Return the numbers of the batches that settings or rollbacks exclude from training."""
        return self.progress.skipped_batches | frozenset(self._prepared.experiment.skip_batches)

    def wait_for_devices(self, report: RunReporter) -> bool:
        """Wait until the devices are done, before a save; return False if the run is to roll back, so that
        there is nothing to save."""
        if self._prepared.experiment.rollback.after:
            report.flush()
        else:
            report.block_until_ready()
        return not self.is_due

    def record_scalars(self, step: int, values: Mapping[str, float]) -> bool:
        """Record the scalars of a step as soon as they are read; return True if the run is to roll back."""
        number, in_a_row = self._numbers.pop(step), int(values.get("skipped_in_a_row", 0))
        # The numbers of updates skipped before batches had numbers are not known.
        skipped = (*self.progress.skipped, number)[-in_a_row:] if in_a_row else ()
        self.progress = dataclasses.replace(self.progress, skipped=skipped)
        config, first = self._prepared.experiment.rollback, step - in_a_row + 1
        self.pending_step = first - 1 if in_a_row and config.after else None
        so_far = sum(not rollback.is_corruption for rollback in self.progress.rollbacks)
        if config.after and in_a_row >= config.after and so_far < config.max_rollbacks:
            self.is_due, self._streak, self._first, self._why = (
                True,
                skipped,
                first,
                describe_skipped_updates(step, values),
            )
        return self.is_due

    def mark_verified(self, step: int) -> None:
        """Record that step `step` gave the same bits on other devices: a later corrupted step rolls back to
        this step or before."""
        self.progress = dataclasses.replace(self.progress, verified=step)

    def mark_corrupted(self, reason: str) -> None:
        """Record that the current step gave other values on other devices: the run is to roll back, skipping
        nothing.

        Args:
            reason: What happened, the same text in every process.

        Raises:
            TrainingError: The run has rolled back too often.
        """
        max_rollbacks, so_far = (
            self._prepared.experiment.verify.max_rollbacks,
            sum(each.is_corruption for each in self.progress.rollbacks),
        )
        if so_far >= max_rollbacks:
            raise TrainingError(
                f"{reason}; verify.max_rollbacks={max_rollbacks} rollbacks are used up: remove the named host from the job, or "
                f"find it with `panax check --full` on each"
            )
        self.is_due, self._corrupted = True, reason

    def roll_back(self, step: int, report: RunReporter) -> RunStart:
        """Restore an earlier state, and record the batches that are skipped from then on.

        Every process of the job calls it, after it has released the state and the data.

        Args:
            step: Steps taken.

        Raises:
            TrainingError: The checkpoint that would be needed is gone.
            PanaxError: As for `find_start`; or the store could not be written.
        """
        heartbeat().phase("restore")
        if not self._corrupted:
            report.flush()
        report.ledger.roll_back()
        self._checkpointer.wait()
        if self._memory is not None:
            self._memory.wait()
        start, again = self._target()
        numbers = range(start.progress.drawn + 1, self._streak[-1] + 1) if again else self._streak
        if self._corrupted:
            numbers = ()
        rollback = Rollback(
            at=round(time.time(), 3),
            step=step,
            to=start.step,
            source=start.source,
            batches=tuple(number for number in numbers if number not in self.skipped_batches),
            why=self._corrupted or self._why,
            data=self.progress.data,
            seconds=round(time.monotonic() - self._reached.get(start.step, min(self._reached.values())), 3),
        )
        progress = dataclasses.replace(
            start.progress,
            rollbacks=(*self.progress.rollbacks, rollback),
            data=self.progress.data,
            verified=min(self.progress.verified, start.step),
        )
        self._record(progress, start)
        self.progress, self.is_due, self._corrupted = progress, False, ""
        self._numbers.clear()
        self._reached = {at: seconds for at, seconds in self._reached.items() if at <= start.step}
        self._reached.setdefault(start.step, time.monotonic())
        report.record_rollback(progress)
        return dataclasses.replace(start, progress=progress)

    def _target(self) -> tuple[RunStart, bool]:
        """Return the state to roll back to, and True if the rollback follows directly on another one."""
        latest = self.progress.verified if self._corrupted else self._first - 1
        before = None if self._corrupted else self._previous_rollback()
        start = None
        if before is not None:
            start = self._newest(before.to - 1)
            latest = min(latest, before.to)
        start = start or self._newest(latest)
        if start is None:
            every = self._prepared.experiment.checkpoint.every
            if 0 < every <= latest:
                raise TrainingError(
                    f"{self._corrupted or self._why}; the run would go back to a checkpoint of step {latest} or before, and "
                    f"there is none in {self._checkpointer.store.url}: --fresh starts from step 0, "
                    f"--{'verify.every' if self._corrupted else 'rollback.after'} 0 continues from the newest one"
                )
            start = start_fresh(self._prepared, self._checkpointer, self._say)
        return start, before is not None

    def _newest(self, at_most: int) -> RunStart | None:
        """Return the newest undamaged state up to this step; changes were accepted when the run began."""
        rollbacks = self.progress.rollbacks
        return restore_newest(
            self._prepared, self._checkpointer, self._memory, self._say,
            rollbacks=rollbacks, at_most=at_most, accept_changes=True,
        )  # fmt: skip

    def _previous_rollback(self) -> Rollback | None:
        """Return the last rollback, if the first update since was skipped too."""
        rollbacks = [rollback for rollback in self.progress.rollbacks if not rollback.is_corruption]
        if not rollbacks or rollbacks[-1].data != self.progress.data:
            return None
        number, last = self._streak[0] - 1, rollbacks[-1]
        while number in self.skipped_batches and number not in last.batches:
            number -= 1
        return last if number in last.batches else None

    def _record(self, progress: DataProgress, start: RunStart) -> None:
        """Write the record, then remove checkpoints that have trained on batches that are skipped now."""
        with raise_on_all_processes():
            if is_process_zero():
                write_rollbacks(self._checkpointer.store, progress.rollbacks)
        self._checkpointer.remove_abandoned(lambda manifest: matches_history(manifest, progress.rollbacks))
        if self._memory is not None:
            self._memory.forget(start.step)
