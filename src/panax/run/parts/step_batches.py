"""The batches of a run's steps, and its evaluations: both from the data, as it is."""

import abc
import contextlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import Any, Generic, NamedTuple, TypeVar

import jax

from ...core import Position, TrainState
from ...data import PrefetchIterator
from ...job.heartbeat import heartbeat
from ...train import evaluate_sent
from ..feed import DeviceBatch, prefetch_to_device
from ..preparation import PreparedRun
from ..reporting.report import RunReporter
from .run_part import RunPart, RunProgress

Item = TypeVar("Item")


class EvaluationStopped(Exception):
    """Exception that cuts an evaluation or a draw short, because the run is to stop."""


class MadeBatches(NamedTuple):
    """Batches of the next steps.

    Attributes:
        batches: On the devices.
        position: Position of the source after the last item that they were made of; None at its beginning.
        number: Number of that item in the source's order, from 1.
    """

    batches: list[dict[str, jax.Array]]
    position: Position | None
    number: int


class StepBatches(RunPart, Generic[Item]):
    """The batches of a run's steps, made of items of its data, and its evaluations."""

    @abc.abstractmethod
    def open(self, run: RunProgress, skipped: Collection[int]) -> PrefetchIterator[Item]:
        """Read the data from the run's position on.

        Args:
            skipped: Numbers of batches that are skipped.
        """

    @abc.abstractmethod
    def make(self, run: RunProgress, item: Item, following: Callable[[], Item | None]) -> MadeBatches:
        """Return the batches of the next steps, given an item of the data.

        Args:
            following: Returns the next item of the data, which is used up then; None at its end.
        """

    @abc.abstractmethod
    def evaluate(self, state: TrainState, step: int, should_stop: Callable[[], bool]) -> Mapping[str, float] | None:
        """Evaluate a state on the held-out data; None without any, and empty if nothing in it counts.

        Args:
            step: Steps taken.
            should_stop: Called before each batch, by every process of the job: returns True if the run is to stop.

        Raises:
            EvaluationStopped: The run is to stop.
        """

    def close(self) -> None:
        """Release resources outside of this process, such as other processes."""


class DataBatches(StepBatches[DeviceBatch]):
    """The data's batches as they are, sent to the devices ahead of the steps."""

    def __init__(self, prepared: PreparedRun):
        self._prepared = prepared

    def open(self, run: RunProgress, skipped: Collection[int]) -> PrefetchIterator[DeviceBatch]:
        source, step = self._prepared.data.train, self._prepared.step
        return prefetch_to_device(source, step, run.position, num_drawn=run.drawn, skipped=skipped)

    def make(self, run: RunProgress, item: DeviceBatch, following: Callable[[], DeviceBatch | None]) -> MadeBatches:
        return MadeBatches([item.batch], item.position, item.number)

    def evaluate(self, state: TrainState, step: int, should_stop: Callable[[], bool]) -> Mapping[str, float] | None:
        prepared = self._prepared
        if prepared.data.held_out is None:
            return None
        max_batches = prepared.experiment.evaluate.batches or None
        with contextlib.closing(
            prefetch_to_device(prepared.data.held_out, prepared.step, max_batches=max_batches, evaluates=True)
        ) as batches:
            values = evaluate_sent(prepared.step, state, _followed(batches, should_stop))
        return prepared.data.add_bits_per_byte(values)


def _followed(batches: Iterable[DeviceBatch], should_stop: Callable[[], bool]) -> Iterator[dict[str, jax.Array]]:
    for batch, _, _ in batches:
        check_continues(should_stop)
        yield batch


def check_continues(should_stop: Callable[[], bool]) -> None:
    """Report that an evaluation makes progress.

    Raises:
        EvaluationStopped: The run is to stop.
    """
    heartbeat().report_alive()
    if should_stop():
        raise EvaluationStopped


def evaluate_state(
    batches: StepBatches[Any],
    state: TrainState,
    step: int,
    report: RunReporter,
    should_stop: Callable[[], bool] = lambda: False,
) -> Mapping[str, float]:
    """Evaluate a state, and report it; empty without held-out data, or if the run is to stop meanwhile."""
    heartbeat().phase("evaluate")
    try:
        evaluation = batches.evaluate(state, step, should_stop)
    except EvaluationStopped:
        return {}
    if evaluation is None:
        return {}
    if not evaluation:
        report.record_missing_evaluation(step)
        return {}
    report.record_evaluation(step, evaluation)
    return evaluation
