"""The training loop. Short on purpose: everything it calls is a value, or a room of its own."""

import contextlib
import dataclasses
import functools
import inspect
import tempfile
import warnings
from collections.abc import Mapping
from typing import Any

import jax

from ..core import TrainState
from ..core.errors import DataError, RecipeError
from ..core.processes import is_first
from ..metrics import Lane, Tracker
from ..metrics.console import shown
from ..train import evaluate_sent
from .experiment import Experiment
from .feed import feed
from .history import read_history, table
from .interrupt import Interrupt
from .keeping import Keeper, due
from .prepare import Prepared, Say, prepare
from .report import Report
from .start import Start, begin, choose_kernels, open_folder, open_memory
from .writing import continue_text


@dataclasses.dataclass(frozen=True, repr=False)
class Result:
    """How a run ended.

    Attributes:
        state: The last step's.
        step: Steps taken, earlier runs of the same command included.
        evaluation: Held-out losses and metrics after the last step; empty without held-out data, or when cut off.
        checkpoint: Where the last checkpoint is.
        interrupted_by: The signal's name, if one ended the run early.
    """

    prepared: Prepared
    state: TrainState
    step: int
    evaluation: Mapping[str, float]
    checkpoint: str
    interrupted_by: str | None = None

    @property
    def history(self) -> Any:
        """What the run has logged, earlier runs of the same command included: a pandas DataFrame, or rows without pandas."""
        return table(read_history(self.prepared.experiment.folder))

    def __repr__(self) -> str:
        held_out = f", held-out loss {self.evaluation['loss']:.4f}" if "loss" in self.evaluation else ""
        cut = f", stopped by {self.interrupted_by}" if self.interrupted_by else ""
        return f"Result(step {self.step}{held_out}{cut}, {self.checkpoint})"

    def generate(self, prompt: str, **settings: Any) -> str:
        """What the trained model writes after `prompt`; settings as `panax.run.continue_text` takes them.

        Raises:
            RecipeError: The task does not generate, or has no tokenizer; or a setting is out of range.
        """
        state, data = self.state, self.prepared.data
        return continue_text(
            self.prepared.task, state.judged_params, state.model_state, data.tokenizer, prompt, **settings
        )


def fit(
    experiment: Experiment,
    *,
    fresh: bool = False,
    accept_changes: bool = False,
    fast_dev_run: bool = False,
    quiet: bool = False,
    say: Say | None = None,
    trackers: tuple[Tracker, ...] = (),
    devices: Any = None,
) -> Result:
    """Train as the experiment says, from the last checkpoint in its folder, if that is of the same experiment.

    Args:
        fresh: Train from step 0; what an earlier run left in the folder is set aside.
        accept_changes: Resume from a run of other settings or data, with its state and today's settings.
        fast_dev_run: Two steps of everything, each with an evaluation and a checkpoint, in a folder that is removed afterwards:
            does it run?
        quiet: Show nothing. Else a terminal shows a bar and lines, a notebook a line that changes.
        say: Takes what a person should know, a line at a time, and nothing else is shown. It is called by a thread that reports
            alone.
        trackers: More places for the scalars to go, besides the JSONL log and TensorBoard.
        devices: JAX devices to use; None for all of them.

    Raises:
        PanaxError: Something outside the program is wrong; the message says what to do. A folder that holds another run's
            checkpoints is a CheckpointError that lists what differs.
    """
    if not isinstance(experiment, Experiment):
        call = f": call it, fit({experiment.__name__}())" if inspect.isfunction(experiment) else ""
        raise RecipeError(f"fit takes an Experiment, and this is a {type(experiment).__name__}{call}")
    if isinstance(trackers, Tracker):
        raise RecipeError(f"trackers is a {type(trackers).__name__}; expected a tuple: trackers=(tracker,)")
    if fresh and accept_changes:
        raise RecipeError("fresh starts from step 0, accept_changes resumes: give one of them")
    if fast_dev_run:
        if fresh or accept_changes or jax.process_count() > 1:
            raise RecipeError("fast_dev_run neither resumes nor starts over, and takes one process; give it alone")
        with tempfile.TemporaryDirectory(prefix="panax-dev-") as folder, warnings.catch_warnings():
            # Two steps are too few for any schedule.
            warnings.filterwarnings("ignore", message="optimizer.schedule.warmup_steps")
            return fit(experiment.tried(folder), quiet=quiet, say=say, trackers=trackers, devices=devices)
    if say is None:
        say, progress = (_unsaid, None) if quiet else shown()
        trackers = trackers if progress is None else (progress, *trackers)
    elif quiet:
        raise RecipeError("quiet shows nothing, say takes what there is to show: give one of them")
    with contextlib.closing(Lane("the console", threaded=not experiment.debug)) as told:
        said = functools.partial(told.put, say) if is_first() else _unsaid
        return _fit(experiment, fresh, accept_changes, said, trackers, devices, told)


def _fit(
    experiment: Experiment,
    fresh: bool,
    accept_changes: bool,
    say: Say,
    trackers: tuple[Tracker, ...],
    devices: Any,
    told: Lane,
) -> Result:
    choose_kernels(experiment, say, fresh=fresh)
    prepared = prepare(experiment, say, devices)
    for note in prepared.task.notes:
        say(f"{experiment.name}: {note}")
    with (
        open_folder(prepared, say, fresh=fresh) as checkpointer,
        open_memory(prepared, checkpointer, say) as memory,
        Interrupt() as interrupt,
    ):
        start = begin(prepared, checkpointer, memory, say, accept_changes=accept_changes)
        checkpointer.prepare(start.state)
        keeper = Keeper(experiment.checkpoint, checkpointer, memory, start.stored)
        with contextlib.closing(Report(prepared, start.step, trackers, say, told)) as report:
            return run(prepared, start, keeper, report, interrupt)


def run(prepared: Prepared, start: Start, keeper: Keeper, report: Report, interrupt: Interrupt) -> Result:
    """Take the steps that are left."""
    experiment, step = prepared.experiment, prepared.step
    state, position, number = start.state, start.position, start.step
    evaluation: Mapping[str, float] = {}
    with contextlib.closing(feed(prepared.data.train, step, position)) as batches:
        batches.gives_up = interrupt.gives_up_waiting
        while number < experiment.num_steps and not interrupt.due(number):
            report.before_step(number)
            with report.clock.measure("data_stall"):
                drawn = next(batches, None)
            if drawn is None and interrupt.gives_up_waiting():
                break
            if drawn is None:
                raise DataError(
                    f"the data ended after {number} of {experiment.num_steps} steps; give more, or fewer steps"
                )
            batch, position = drawn
            with report.clock.measure("dispatch"):
                state, scalars = step(state, batch)
            number += 1
            evaluation = {}
            # Reads the scalars of the step before, while this one runs: the devices never wait for the loop.
            report.after_step(number, scalars, batch, position)
            if due(experiment.evaluate.every, number) and number < experiment.num_steps:
                evaluation = judge(prepared, state, number, report)
            if number < experiment.num_steps:
                with report.clock.measure("save"):
                    keeper.after_step(state, number, position, evaluation)
    report.flush()
    if number == experiment.num_steps:
        evaluation = judge(prepared, state, number, report)
    checkpoint = keeper.at_end(state, number, position, evaluation)
    report.account(number, position)
    signal = None if interrupt.signal is None else interrupt.signal.name
    return Result(prepared, state, number, evaluation, checkpoint, signal)


def _unsaid(line: str) -> None:
    """Where nothing is shown: on other processes than the first one, and by choice."""


def judge(prepared: Prepared, state: TrainState, number: int, report: Report) -> Mapping[str, float]:
    """Evaluate on the held-out data; empty where there is none."""
    report.flush()
    if prepared.data.held_out is None:
        return {}
    most = prepared.experiment.evaluate.batches or None
    with contextlib.closing(feed(prepared.data.held_out, prepared.step, most=most)) as batches:
        evaluation = prepared.data.judged(evaluate_sent(prepared.step, state, (batch for batch, _ in batches)))
    report.evaluation(number, evaluation)
    return evaluation
