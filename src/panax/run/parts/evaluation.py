"""Evaluation of a run on its held-out data: every few steps, on request, and at its end."""

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping

import jax

from ...core import TrainState
from ...job.heartbeat import heartbeat
from ...train import evaluate_sent
from ..feed import DeviceBatch, prefetch_to_device
from ..opened_data import LogFn
from ..preparation import PreparedRun
from ..recovery.emergency_save import EmergencySave
from ..recovery.interrupt import SignalHandler
from ..reporting.report import RunReporter
from .phases import RunPhase
from .run_part import RunPart, RunProgress, is_step_due


class PeriodicEvaluation(RunPart):
    """Evaluates a run on its held-out data."""

    def __init__(
        self,
        prepared: PreparedRun,
        report: RunReporter,
        interrupt: SignalHandler,
        emergency: EmergencySave,
        say: LogFn,
    ):
        self._prepared, self._report, self._say = prepared, report, say
        self._interrupt, self._emergency = interrupt, emergency

    def after_step(self, run: RunProgress) -> None:
        due = run.must_evaluate or is_step_due(self._prepared.experiment.evaluate.every, run.step)
        if due and run.takes_steps:
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
            evaluation = evaluate_held_out(
                self._prepared, run.state, run.step, self._report, self._interrupt.should_stop
            )
            if not evaluation and self._interrupt.signal is not None:
                self._say(f"the evaluation of step {run.step} is abandoned: {self._interrupt.signal.name} received")
            self._report.record_compilation()
            if evaluation:
                run.record_evaluation(evaluation)


class _EvaluationStopped(Exception):
    """Exception that cuts an evaluation short, because the run is to stop."""


def evaluate_held_out(
    prepared: PreparedRun,
    state: TrainState,
    number: int,
    report: RunReporter,
    should_stop: Callable[[], bool] = lambda: False,
) -> Mapping[str, float]:
    """Evaluate on the held-out data; empty without any, or if the run is to stop meanwhile.

    Args:
        should_stop: Called before each batch, by every process of the job: returns True if the run is to stop.
    """
    if prepared.data.held_out is None:
        return {}
    heartbeat().phase("evaluate")
    max_batches = prepared.experiment.evaluate.batches or None
    with contextlib.closing(
        prefetch_to_device(prepared.data.held_out, prepared.step, max_batches=max_batches, evaluates=True)
    ) as batches:
        try:
            evaluation = prepared.data.add_bits_per_byte(
                evaluate_sent(prepared.step, state, _followed(batches, should_stop))
            )
        except _EvaluationStopped:
            return {}
    if not evaluation:
        report.record_missing_evaluation(number)
        return {}
    report.record_evaluation(number, evaluation)
    return evaluation


def _followed(batches: Iterable[DeviceBatch], should_stop: Callable[[], bool]) -> Iterator[dict[str, jax.Array]]:
    for batch, _, _ in batches:
        heartbeat().report_alive()
        if should_stop():
            raise _EvaluationStopped
        yield batch
