"""The training loop. Short on purpose: everything it calls is a value, or a room of its own."""

import contextlib
import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..checkpoint import Checkpointer
from ..core import TrainState
from ..core.errors import DataError
from ..data import prefetch
from ..metrics import Tracker
from ..train import evaluate_all
from .experiment import Experiment
from .interrupt import Interrupt
from .prepare import Prepared, Say, held_out_batches, prepare
from .report import Report
from .start import Start, begin, open_folder


@dataclasses.dataclass(frozen=True)
class Result:
    """How a run ended.

    Attributes:
        state: The last step's.
        step: Steps taken, earlier runs of the same command included.
        evaluation: Held-out losses and metrics after the last step; empty without held-out data, or when cut off.
        checkpoint: The folder of the last checkpoint.
        interrupted_by: The signal's name, if one ended the run early.
    """

    prepared: Prepared
    state: TrainState
    step: int
    evaluation: Mapping[str, float]
    checkpoint: Path
    interrupted_by: str | None = None


def fit(experiment: Experiment, *, say: Say = print, trackers: tuple[Tracker, ...] = (), devices: Any = None) -> Result:
    """Train as the experiment says, from where the last checkpoint in its folder stands.

    Args:
        say: Takes what a person should know, a line at a time.
        trackers: More places for the scalars to go, besides the JSONL log and TensorBoard.
        devices: JAX devices to use; all of them unless told.

    Raises:
        PanaxError: Something outside the program is wrong; the message says what to do.
    """
    prepared = prepare(experiment, say, devices)
    with open_folder(prepared) as checkpointer, Interrupt() as interrupt:
        start = begin(prepared, checkpointer, say)
        with contextlib.closing(Report(prepared, start.step, trackers, say)) as report:
            return run(prepared, start, checkpointer, report, interrupt)


def run(prepared: Prepared, start: Start, checkpointer: Checkpointer, report: Report, interrupt: Interrupt) -> Result:
    """Take the steps that are left."""
    experiment, step = prepared.experiment, prepared.step
    state, position, number = start.state, start.position, start.step
    evaluation: Mapping[str, float] = {}
    with contextlib.closing(prefetch(prepared.data.train.batches(position))) as batches:
        while number < experiment.num_steps and interrupt.signal is None:
            report.before_step(number)
            with report.clock.measure("data"):
                drawn = next(batches, None)
            if drawn is None:
                raise DataError(
                    f"the data ended after {number} of {experiment.num_steps} steps; give more, or fewer steps"
                )
            batch, position = drawn
            with report.clock.measure("dispatch"):
                state, scalars = step(state, step.put(batch))
            number += 1
            evaluation = {}
            # Reads the scalars of the step before, while this one runs: the devices never wait for the loop.
            report.after_step(number, scalars, batch)
            if due(experiment.evaluate.every, number) and number < experiment.num_steps:
                evaluation = judge(prepared, state, number, report)
            if due(experiment.checkpoint.every, number) and number < experiment.num_steps:
                with report.clock.measure("save"):
                    checkpointer.save(state, number, {"data": dict(position)}, evaluation.get("loss"))
    report.flush()
    if number == experiment.num_steps:
        evaluation = judge(prepared, state, number, report)
    if checkpointer.latest() != number:
        checkpointer.save(state, number, {"data": position and dict(position)}, evaluation.get("loss"))
    checkpointer.wait()
    signal = None if interrupt.signal is None else interrupt.signal.name
    return Result(prepared, state, number, evaluation, checkpointer.path(number), signal)


def due(every: int, number: int) -> bool:
    """Whether something done every so many steps is to be done after step `number`; never, for 0."""
    return every > 0 and number % every == 0


def judge(prepared: Prepared, state: TrainState, number: int, report: Report) -> Mapping[str, float]:
    """Evaluate on the held-out data; empty where there is none."""
    report.flush()
    if prepared.data.held_out is None:
        return {}
    evaluation = evaluate_all(prepared.step, state, held_out_batches(prepared))
    report.evaluation(number, evaluation)
    return evaluation
