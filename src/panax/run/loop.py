"""`Run`: the training loop. Short on purpose: everything that happens beside the steps is a part of the run."""

import contextlib
from collections.abc import Iterator, Mapping

import jax

from ..core.errors import DataError, RecipeError
from ..data.loading.batch_ramp import RampedSource
from ..job.heartbeat import heartbeat
from ..train import Scalars
from .opened_data import LogFn
from .parts.hook_runner import HookRunner
from .parts.phases import RunEvent, RunPhase
from .parts.run_actions import RunActions
from .parts.run_part import RunProgress
from .parts.run_parts import RunParts
from .parts.run_start import RunStart
from .preparation import PreparedRun
from .recovery.fallback_layouts import write_fallback_layouts
from .result import Result


class Run(RunActions):
    """A run in progress: its batches, and the work after each step. `fit` is this loop, with the experiment's
    own step:

        for batch in run:
            run.after_step(run.take_step(batch))

    Attributes:
        state: Parameters, optimizer state and the rest. A loop that takes custom steps sets it.
        step: Steps taken.
        batch: The last batch, on the devices.
        result: How the run ended; None until then.
    """  # fmt: skip

    def __init__(self, prepared: PreparedRun, start: RunStart, parts: RunParts, say: LogFn):
        self.prepared, self.say = prepared, say
        self.result: Result | None = None
        self._parts, self._report, self._interrupt = parts, parts.report, parts.interrupt
        self._hooks = HookRunner(prepared.experiment, self, parts.report.clock)
        order = parts.in_order(self._hooks)
        self._progress = RunProgress(start.state, start.step, start.position, start.progress.drawn, order)
        self._continue_from(start)

    def _continue_from(self, start: RunStart) -> None:
        self._position, self._number = start.position, start.progress.drawn
        self._progress.restore(start, self.experiment.num_steps)

    def __iter__(self) -> Iterator[dict[str, jax.Array]]:
        """Yield the batches of the remaining steps; `after_step` is to be called after each.

        If updates can't be applied, the run may roll back: `step` and `state` are then those of an earlier
        checkpoint.
        """
        while True:
            self._report.ledger.begin_steps(self.step)
            yield from self._batches()
            if self._progress.phase is RunPhase.COMPLETE:
                self._report.flush()
                if self._parts.rollback.is_due:
                    self._progress.handle(RunEvent.ROLLBACK_DUE)
            if not self._progress.phase.restores:
                return
            self._restore()

    def _restore(self) -> None:
        """Continue from the state that a rollback, or the other islands, lead to."""
        if self._progress.phase is RunPhase.CATCHING_UP:
            start = self._catch_up()
        else:
            # Free the memory for the state that is restored.
            del self._progress.state
            start = self._parts.rollback.roll_back(self.step, self._report)
        self._progress.handle(RunEvent.RESTORED)
        self._continue_from(start)

    def _catch_up(self) -> RunStart:
        island, rollback, checkpoints = self._parts.island, self._parts.rollback, self._parts.checkpoints
        assert island is not None
        self._report.flush()
        own_start = RunStart(
            self.state,
            self.step,
            self._progress.position,
            checkpoints.stored_step,
            self._hooks.collect_state(),
            rollback.progress,
            best=checkpoints.best,
        )
        return island.catch_up(self.state, own_start, rollback.skipped_batches)

    def _batches(self) -> Iterator[dict[str, jax.Array]]:
        """Yield the batches up to the end, or to a rollback."""
        progress, first, skipped = self._progress, self.step, self._parts.rollback.skipped_batches
        source, made = self.prepared.data.train, self._parts.batches
        with contextlib.closing(made.open(progress, skipped)) as batches:
            batches.should_stop = self._interrupt.should_abandon_wait
            while progress.takes_steps and not self._is_interrupted(self._interrupt.should_stop()):
                self._report.before_step(self.step)
                late = self._report.measure_data_wait() if batches.is_late else contextlib.nullcontext()
                guard = self._parts.emergency.on_error(progress, "the data")
                with self._report.clock.measure("data_stall"), late, guard:
                    item = next(batches, None)
                    if item is None and self._is_interrupted(self._interrupt.should_abandon_wait()):
                        return
                    if item is None:
                        raise DataError(
                            f"the data ended after {self.step} of {self.experiment.num_steps} steps"
                            + (f", with {len(skipped)} batches skipped" if skipped else "")
                            + "; provide more data or lower num_steps"
                        )
                with self._parts.emergency.on_error(progress, "the data"):
                    next_batches, self._position, self._number = made.make(progress, item, lambda: next(batches, None))
                for left, progress.batch in zip(reversed(range(len(next_batches))), next_batches, strict=True):
                    if (before := self.step) == first:
                        parts = source.parts_at(progress.position) if isinstance(source, RampedSource) else 1
                        write_fallback_layouts(self.prepared, self.batch, parts)
                    progress.batches_left = left
                    yield self.batch
                    if self.step != before + 1:
                        raise RecipeError("call run.after_step(scalars) once for each batch of `for batch in run`")
                    if not progress.takes_steps:
                        break

    def _is_interrupted(self, by_signal: bool) -> bool:
        if by_signal:
            self._progress.handle(RunEvent.SIGNAL)
        return by_signal

    def take_step(self, batch: Mapping[str, jax.Array]) -> Scalars:
        """Take the experiment's own step; return its scalars before the devices are done."""
        with self._report.clock.measure("dispatch"):
            self.state, scalars = self._parts.verifier.run_step(self.state, batch, self.step + 1)
        self._report.record_compilation()
        return scalars

    def after_step(self, scalars: Scalars) -> None:
        """Count the step, and do everything that is due after it: report, call hooks, evaluate, save.

        Args:
            scalars: Scalars of the step, by name; they are read while the next step runs.

        Raises:
            RecipeError: The run has ended.
        """
        if not self._progress.takes_steps:
            raise RecipeError(
                f"run.after_step: no step follows after step {self.step}, since the run {self._progress.phase.value}; leave the "
                f"loop, as `for batch in run` does"
            )
        self._interrupt.record_step()
        heartbeat().step(self.step + 1)
        self._progress.after_step(scalars, self._position, self._number, self.experiment.num_steps)

    def finish(self) -> Result:
        """Evaluate, unless the run was cut off; save; return how it ended."""
        progress, parts, report = self._progress, self._parts, self._report
        if progress.phase.restores:
            # The caller has left the loop at a step that does not count.
            self._restore()
        report.flush()
        parts.questions.at_end(progress)
        parts.evaluation.at_end(progress)
        report.ledger.record_step(self.step)
        with report.ledger.measure("checkpoint wait"):
            checkpoint = parts.checkpoints.save_last(progress)
        if (line := parts.checkpoints.describe_lost_best()) is not None:
            self.say(line)
        report.ledger.switch("start")
        self._hooks.call("at_end")
        report.record_data_usage(self.step, progress.position)
        self._hooks.raise_failure(checkpoint, progress.phase)
        # With all its steps a run is done, whatever was requested meanwhile.
        stopped, signal = "", None
        if self.step < self.experiment.num_steps:
            stopped = progress.stop_reason
            signal = None if self._interrupt.signal is None else self._interrupt.signal.name
        reason = f"stopped by {signal}" if signal else f"stopped: {stopped or 'the loop was left'}"
        report.end(self.step, "done" if self.step == self.experiment.num_steps else reason)
        self.result = Result(self.prepared, self.state, self.step, progress.evaluation, checkpoint, signal, stopped)
        return self.result
