"""Evaluation of a run on its held-out data: every few steps, on request, and at its end."""

from typing import Any

from ..opened_data import LogFn
from ..preparation import PreparedRun
from ..recovery.emergency_save import EmergencySave
from ..recovery.interrupt import SignalHandler
from ..reporting.report import RunReporter
from .phases import RunPhase
from .run_part import RunPart, RunProgress, is_step_due
from .step_batches import StepBatches, evaluate_state


class PeriodicEvaluation(RunPart):
    """Evaluates a run on its held-out data."""

    def __init__(
        self,
        prepared: PreparedRun,
        batches: StepBatches[Any],
        report: RunReporter,
        interrupt: SignalHandler,
        emergency: EmergencySave,
        say: LogFn,
    ):
        self._prepared, self._batches, self._report, self._say = prepared, batches, report, say
        self._interrupt, self._emergency = interrupt, emergency
        self._is_late = False

    def after_step(self, run: RunProgress) -> None:
        due = self._is_late or run.must_evaluate or is_step_due(self._prepared.experiment.evaluate.every, run.step)
        # A state that can't be saved yet is not evaluated: it may be the best.
        self._is_late = due and run.batches_left > 0
        if due and run.takes_steps and not run.batches_left:
            with self._emergency.on_error(run, "the evaluation"):
                self._evaluate(run)

    def at_end(self, run: RunProgress) -> None:
        """Evaluate the last state, unless the run was cut off; if that fails, save it first."""
        if run.phase in (RunPhase.COMPLETE, RunPhase.STOPPED) and not run.evaluation:
            with self._emergency.on_last_error(run):
                self._evaluate(run)

    def _evaluate(self, run: RunProgress) -> None:
        self._report.flush()
        with self._report.ledger.measure("evaluation"):
            evaluation = evaluate_state(self._batches, run.state, run.step, self._report, self._interrupt.should_stop)
            if not evaluation and self._interrupt.signal is not None:
                self._say(f"the evaluation of step {run.step} is abandoned: {self._interrupt.signal.name} received")
            self._report.record_compilation()
            if evaluation:
                run.record_evaluation(evaluation)
