"""Saves before an exception ends a run: of a data loader, its worker, or an evaluation."""

import contextlib
from collections.abc import Iterator

import jax

from ...core.errors import LayoutError
from ..opened_data import LogFn
from ..parts.run_part import RunProgress
from ..reporting.report import RunReporter
from .checkpointing import CheckpointSchedule
from .rollback import RollbackController


class EmergencySave:
    """Saves the steps since the last save before an exception is raised, if that is possible.

    With many processes another one may not have failed, and would not enter the save's collectives: then the last
    checkpoint is all that remains.
    """

    def __init__(self, checkpoints: CheckpointSchedule, rollback: RollbackController, report: RunReporter, say: LogFn):
        self._checkpoints, self._rollback, self._report, self._say = checkpoints, rollback, report, say

    @contextlib.contextmanager
    def on_error(self, run: RunProgress, source: str) -> Iterator[None]:
        """Save, then re-raise, if anything raises inside, `sys.exit` included. A second Ctrl-C ends the run at once.

        Args:
            source: Name of the work inside, for the message.
        """
        try:
            yield
        except (Exception, SystemExit) as error:
            unsaved = run.step > 0 and self._checkpoints.stored_step != run.step and not run.batches_left
            if jax.process_count() == 1 and unsaved and not run.phase.restores:
                self._save(run, error, source)
            raise

    def _save(self, run: RunProgress, error: BaseException, source: str) -> None:
        try:
            self._report.flush()
            if self._rollback.wait_for_devices(self._report):
                saved = self._checkpoints.save_last(run)
                self._say(f"{source} raised {type(error).__name__}; step {run.step} is saved: {saved}")
        except Exception as further:
            # The first error is the one to show.
            self._say(
                f"warning: {source} raised {type(error).__name__}, and step {run.step} could not be saved: {further}"
            )

    @contextlib.contextmanager
    def on_last_error(self, run: RunProgress) -> Iterator[None]:
        """Save, then re-raise, if the evaluation of the last state raises inside."""
        try:
            yield
        except Exception as error:
            # A layout that can't be used fails in every process.
            if jax.process_count() == 1 or isinstance(error, LayoutError):
                saved = self._checkpoints.save_last(run)
                self._say(f"the last evaluation failed; step {run.step} is saved: {saved}")
            raise
