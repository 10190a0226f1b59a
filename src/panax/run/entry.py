"""`fit` and `open_run`: a run of an experiment, with its folder, checkpoints, reports and signals."""

import contextlib
import dataclasses
import functools
import inspect
import tempfile
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax

from ..checkpoint import raise_on_all_processes
from ..compiling.cache import install_compile_cache
from ..compiling.callbacks import reraise_callback_errors
from ..core.errors import PanaxError, RecipeError, describe_type
from ..core.task import Task
from ..job.agreement import is_process_zero
from ..job.heartbeat import heartbeat
from ..job.join import this_membership
from ..metrics import BackgroundReporter, Tracker
from ..metrics.console import open_console
from ..metrics.run_log import RunLog, tee
from ..system.platform_check import check_platform
from ..train.initialization import check_memory
from .blank_data import find_missing_data
from .experiment import Experiment
from .loop import Run
from .opened_data import LogFn
from .parts.rollout_batches import check_draws
from .parts.run_parts import RunParts, RunSaves
from .preparation import PreparedRun, prepare
from .recovery.interrupt import SignalHandler
from .recovery.islands import Island
from .recovery.rollback import RollbackController, with_trusted_step
from .recovery.verification import check_verifiable
from .reporting.report import ReportTargets, RunReporter
from .reporting.session import open_ledger
from .result import Result
from .setting_checks import check_held_out, check_questions, interval_notes, precision_notes
from .start import choose_kernels, find_start, open_folder, open_memory


def fit(
    experiment: Experiment,
    *,
    fresh: bool = False,
    accept_changes: bool = False,
    fast_dev_run: bool = False,
    quiet: bool = False,
    say: LogFn | None = None,
    trackers: tuple[Tracker, ...] = (),
    devices: Any = None,
) -> Result:
    """Train an experiment, from the last checkpoint in its folder if that is of the same experiment.

    Args:
        fresh: Train from step 0; files of an earlier run in the folder are archived in a subfolder.
        accept_changes: Resume from a run of other settings or data, with its state and today's settings.
        fast_dev_run: Two steps of everything, each with an evaluation and a checkpoint, in a folder that is
            removed afterwards, as a test of the experiment.
        quiet: Show nothing. By default a terminal shows a bar and lines, a notebook a line that changes.
        say: Called with each message for the user, a line at a time; nothing else is shown. It is called by a
            separate reporting thread.
        trackers: Additional trackers, after the experiment's, the JSONL log and TensorBoard.
        devices: JAX devices to use; None for all of them.

    Raises:
        PanaxError: Something outside the program is wrong; the message states what to do. If the folder holds
            another run's checkpoints, it is a CheckpointError that lists the differences.
    """
    check_experiment(experiment, "fit")
    if fresh and accept_changes:
        raise RecipeError("fresh starts from step 0, accept_changes resumes: pass one of them")
    if fast_dev_run:
        if fresh or accept_changes or jax.process_count() > 1:
            raise RecipeError("fast_dev_run neither resumes nor starts over, and takes one process; pass it alone")
        with tempfile.TemporaryDirectory(prefix="panax-dev-") as folder, warnings.catch_warnings():
            # Two steps are too few for any schedule.
            warnings.filterwarnings("ignore", message="optimizer.schedule.warmup_steps")
            return fit(experiment.dry_run_copy(folder), quiet=quiet, say=say, trackers=trackers, devices=devices)
    with open_run(
        experiment,
        fresh=fresh,
        accept_changes=accept_changes,
        quiet=quiet,
        say=say,
        trackers=trackers,
        devices=devices,
    ) as run:
        for batch in run:
            run.after_step(run.take_step(batch))
    assert run.result is not None
    return run.result


@contextlib.contextmanager
def open_run(
    experiment: Experiment,
    *,
    fresh: bool = False,
    accept_changes: bool = False,
    quiet: bool = False,
    say: LogFn | None = None,
    trackers: tuple[Tracker, ...] = (),
    devices: Any = None,
) -> Iterator[Run]:
    """Open a run with a custom loop and everything that `fit` has: checkpoints, data position, reports,
    hooks, signals.

        with panax.open_run(experiment) as run:
            for batch in run:
                scalars = run.take_step(batch)  # or your own: run.state, scalars = ...
                run.after_step(scalars)
        print(run.result)

    The run resumes from the last checkpoint in the experiment's folder. Leaving the block normally evaluates
    and saves, also after a `break`; an exception leaves the last checkpoint as it is. Arguments and errors
    are those of `fit`.
    """  # fmt: skip
    check_experiment(experiment, "open_run")
    if fresh and accept_changes:
        raise RecipeError("fresh starts from step 0, accept_changes resumes: pass one of them")
    if quiet and say is not None:
        raise RecipeError("quiet shows nothing, and say receives each line: pass one of them")
    if isinstance(trackers, Tracker):
        raise RecipeError(f"trackers is {describe_type(trackers)}; expected a tuple: trackers=(tracker,)")
    with _output(experiment, say, trackers, quiet=quiet) as output:
        prepared = _prepare_checked(experiment, output, devices, fresh=fresh)
        say = output.targets.say
        with (
            open_folder(prepared, say, fresh=fresh) as checkpointer,
            open_ledger(prepared, say) as ledger,
            open_memory(prepared, checkpointer, say) as memory,
            SignalHandler() as interrupt,
            _logged(output.log, prepared.folder, say),
        ):
            heartbeat().phase("restore")
            start = find_start(prepared, checkpointer, memory, say, accept_changes=accept_changes)
            island = None
            if experiment.comms.islands.count > 1:
                island = Island(prepared, say, lambda: interrupt.signal is not None, fresh=fresh)
                start = island.join(start, start.progress.skipped_batches | frozenset(experiment.skip_batches))
            start = with_trusted_step(start, prepared)
            checkpointer.prepare(start.state if start.base is None else start.base.leave_out(start.state))
            rollback = RollbackController(prepared, start, checkpointer, memory, say)
            targets = dataclasses.replace(output.targets, run_id=checkpointer.run_name())
            with contextlib.closing(
                RunReporter(prepared, start.step, targets, ledger, rollback.record_scalars)
            ) as report:
                saves = RunSaves(checkpointer, memory, start.base)
                parts = RunParts.create(prepared, saves, rollback, report, interrupt, island, say)
                with contextlib.closing(parts.batches):
                    run = Run(prepared, start, parts, say)
                    heartbeat().phase("compile")
                    yield run
                    heartbeat().phase("end")
                    result = run.finish()
                    output.detail(_end_of(result, experiment.num_steps))


@dataclasses.dataclass(frozen=True)
class _Output:
    """Outputs of a run: for the user, trackers, and its log.

    Attributes:
        log: The log in the run's folder; None in a launched run: a supervisor stores its output.
    """

    targets: ReportTargets
    log: RunLog | None

    def detail(self, line: str) -> None:
        """Write a line to the log alone."""
        if self.log is not None:
            self.log.say(line)


@contextlib.contextmanager
def _output(
    experiment: Experiment, say: LogFn | None, trackers: tuple[Tracker, ...], *, quiet: bool
) -> Iterator[_Output]:
    """Open the outputs of a run, of which only the first process has any."""
    if say is None and quiet:
        say = _unsaid
    elif say is None:
        say, progress = open_console()
        trackers = (progress, *trackers)
    # In a launched run, the supervisor stores the output of each process.
    log = None if heartbeat().is_supervised else RunLog()
    if log is not None:
        say, trackers = tee(say, log.say), (*trackers, log.tracker)
    with (
        reraise_callback_errors(),
        contextlib.closing(BackgroundReporter("the console", threaded=not experiment.debug)) as messages,
    ):
        from_thread = functools.partial(messages.put, say) if is_process_zero() else _unsaid
        yield _Output(ReportTargets(from_thread, trackers, messages), log)


def _prepare_checked(experiment: Experiment, output: _Output, devices: Any, *, fresh: bool) -> PreparedRun:
    """Prepare a run, check everything that needs no folder, and report notes on its settings."""
    say, place = output.targets.say, this_membership()
    if place is not None and jax.process_count() == 1:
        say(f"warning: this is {place}, and trains alone; call panax.join() before anything else to train together")
    check_platform()
    install_compile_cache(say)
    compute_dtype = choose_kernels(experiment, say, fresh=fresh, detail=output.detail)
    prepared = prepare(experiment, say, devices, compute_dtype=compute_dtype)
    check_verifiable(prepared)
    with raise_on_all_processes():
        check_memory(prepared.step.program.abstract, prepared.step.shardings)
        check_held_out(prepared)
        check_questions(prepared)
        check_draws(prepared)
    for note in (*interval_notes(experiment), *precision_notes(prepared)):
        say(note)
    for note in prepared.task.notes:
        say(f"{experiment.name}: {note}")
    return prepared


def _end_of(result: Result, num_steps: int) -> str:
    why = f"stopped: {result.stopped}" if result.stopped else "done"
    if result.interrupted_by:
        why = f"stopped by {result.interrupted_by}"
    return f"{why} after step {result.step} of {num_steps}; saved {result.checkpoint}"


@contextlib.contextmanager
def _logged(log: RunLog | None, folder: str, say: LogFn) -> Iterator[None]:
    """Open the log of a run in its folder while the run lasts, and log the error that ends it."""
    if log is None or not is_process_zero():
        yield
        return
    log.open(Path(folder))
    try:
        yield
    except BaseException as error:
        said_of = str(error) if isinstance(error, PanaxError) else f"{type(error).__name__}: {error}"
        log.say(f"ended by an error: {said_of}")
        raise


def check_experiment(experiment: Any, function: str) -> None:
    """Check that `experiment` is an `Experiment` with data; errors name the function that was called.

    Raises:
        RecipeError: `experiment` is something else.
        DataError: The experiment has no data yet.
    """
    if not isinstance(experiment, Experiment):
        call = f": call it, {function}({experiment.__name__}())" if inspect.isfunction(experiment) else ""
        hint = Task.hint_for(experiment)
        way = f": write {function}(Experiment(task=..., data=...)), and {hint}" if hint else call
        raise RecipeError(f"{function} takes an Experiment, and this is {describe_type(experiment)}{way}")
    absent = find_missing_data(experiment)
    if absent is not None:
        raise absent.missing_data_error()


def _unsaid(line: str) -> None:
    """Discard a message: on all processes but the first, and if `quiet`."""
