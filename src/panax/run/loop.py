"""`Run`: the training loop. Short on purpose: everything it calls is a value, or a module of its own."""

import contextlib
import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import jax

from ..core import TrainState
from ..core.errors import DataError, LayoutError, RecipeError
from ..data.loading.batch_ramp import RampedSource
from ..job.heartbeat import heartbeat
from ..metrics import Histogram
from ..metrics.film import Frames
from ..metrics.heat_map import Picture
from ..train import Scalars, evaluate_sent
from .experiment import Experiment
from .feed import DeviceBatch, prefetch_to_device
from .opened_data import LogFn
from .preparation import PreparedRun
from .recovery.checkpointing import CheckpointSchedule, is_step_due
from .recovery.fallback_layouts import write_fallback_layouts
from .recovery.hardware_probe import HardwareProbe
from .recovery.interrupt import SignalHandler
from .recovery.islands import Island
from .recovery.rollback import RollbackController
from .recovery.verification import SdcVerifier
from .reporting.generation import TextModel, generate_text
from .reporting.histograms import weight_histograms
from .reporting.hook_runner import HookRequests, HookRunner
from .reporting.report import RunReporter
from .result import Result
from .start import RunStart

RESERVED_NAMES = frozenset({"step", "run"})
"""Names that every line of a log has already."""


@dataclasses.dataclass(frozen=True)
class RunRecovery:
    """Parts of a run that save its state, and let it survive errors, signals and lost islands."""

    checkpoints: CheckpointSchedule
    rollback: RollbackController
    verifier: SdcVerifier
    interrupt: SignalHandler
    island: Island | None = None


class Run:
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

    def __init__(
        self,
        prepared: PreparedRun,
        start: RunStart,
        recovery: RunRecovery,
        report: RunReporter,
        say: LogFn,
    ):
        self.prepared = prepared
        self.batch: dict[str, jax.Array] = {}
        self.result: Result | None = None
        self.say = say
        self._report, self._recovery = report, recovery
        self._checkpoints, self._rollback = recovery.checkpoints, recovery.rollback
        self._interrupt, self._island = recovery.interrupt, recovery.island
        self._probing = HardwareProbe(prepared, report)
        self._stopped, self._failed = "", False
        self._hook_runner = HookRunner(self.experiment.hooks)
        self._checkpoints.hook_state = lambda: self._hook_runner.collect_state(self)
        self._begin(start)

    @property
    def experiment(self) -> Experiment:
        return self.prepared.experiment

    def _begin(self, start: RunStart) -> None:
        """Continue from a start, with the hooks in its state."""
        self.state, self.step = start.state, start.step
        self._position = self._drawn = start.position
        self._number = start.progress.drawn
        self._evaluation: Mapping[str, float] = {}
        self._goes_back = False
        self._checkpoints.begin(start.best)
        self._hook_runner.begin(self, start.hooks)
        if self._hook_runner:
            self._take_requests(self._hook_runner.requests.all_reduce())

    def __iter__(self) -> Iterator[dict[str, jax.Array]]:
        """Yield the batches of the remaining steps; `after_step` is to be called after each.

        If updates can't be applied, the run may roll back: `step` and `state` are then those of an earlier
        checkpoint.
        """
        while True:
            self._report.ledger.begin_steps(self.step)
            yield from self._batches()
            if self._is_behind:
                self._begin(self._catch_up())
                continue
            if self.step == self.experiment.num_steps and not (self._stopped or self._failed or self._goes_back):
                self._report.flush()
                self._goes_back = self._rollback.is_due
            if not self._goes_back:
                return
            # Free the memory for the state that is restored.
            del self.state
            self._begin(self._rollback.roll_back(self.step))

    def _batches(self) -> Iterator[dict[str, jax.Array]]:
        """Yield the batches up to the end, or to a rollback."""
        report, interrupt, sender, first = self._report, self._interrupt, self.prepared.step, self.step
        skipped = self._rollback.skipped_batches
        with contextlib.closing(
            prefetch_to_device(
                self.prepared.data.train, sender, self._position, num_drawn=self._number, skipped=skipped
            )
        ) as batches:
            batches.should_stop = interrupt.should_abandon_wait
            while not (self._ended or self._goes_back or self._is_behind or interrupt.should_stop()):
                report.before_step(self.step)
                late = report.measure_data_wait() if batches.is_late else contextlib.nullcontext()
                with report.clock.measure("data_stall"), late, self._save_on_error("the data"):
                    item = next(batches, None)
                    if item is None and interrupt.should_abandon_wait():
                        return
                    if item is None:
                        raise DataError(
                            f"the data ended after {self.step} of {self.experiment.num_steps} steps"
                            + (f", with {len(skipped)} batches skipped" if skipped else "")
                            + "; provide more data or lower num_steps"
                        )
                self.batch, self._drawn, self._number = item
                if (before := self.step) == first:
                    train = self.prepared.data.train
                    parts = train.parts_at(self._position) if isinstance(train, RampedSource) else 1
                    write_fallback_layouts(self.prepared, self.batch, parts)
                yield self.batch
                if self.step != before + 1:
                    raise RecipeError("call run.after_step(scalars) once for each batch of `for batch in run`")

    @contextlib.contextmanager
    def _save_on_error(self, source: str) -> Iterator[None]:
        """Save, then re-raise, if a data loader, its worker or held-out data raises inside, `sys.exit`
        included.

        With many processes another one may not have failed, and would not enter the save's collectives: then
        the last checkpoint is all that remains. A second Ctrl-C ends the run at once.
        """
        try:
            yield
        except (Exception, SystemExit) as error:
            if (
                jax.process_count() == 1
                and self.step > 0
                and self._checkpoints.stored_step != self.step
                and not self._goes_back
            ):
                self._save_before(error, source)
            raise

    def _save_before(self, error: BaseException, source: str) -> None:
        try:
            self._report.flush()
            if self._rollback.wait_for_devices():
                saved = self._checkpoints.at_end(self.state, self.step, self._position, self._evaluation)
                self.say(f"{source} raised {type(error).__name__}; step {self.step} is saved: {saved}")
        except Exception as further:
            # The first error is the one to show.
            self.say(
                f"warning: {source} raised {type(error).__name__}, and step {self.step} could not be saved: {further}"
            )

    def take_step(self, batch: Mapping[str, jax.Array]) -> Scalars:
        """Take the experiment's own step; return its scalars before the devices are done."""
        with self._report.clock.measure("dispatch"):
            self.state, scalars = self._recovery.verifier.run_step(self.state, batch, self.step + 1)
        self._report.record_compilation()
        return scalars

    def after_step(self, scalars: Scalars) -> None:
        """Count the step, and do everything that is due after it: report, call hooks, evaluate, save.

        Args:
            scalars: Scalars of the step, by name; they are read while the next step runs.
        """
        self.step += 1
        self._interrupt.has_news = True
        heartbeat().step(self.step)
        self._position, self._evaluation = self._drawn, {}
        self._rollback.record_batch(self.step, self._number)
        # Reads the scalars of the step before, while this one runs: the devices never wait for the loop.
        self._report.after_step(self.step, scalars, self.batch, self._position)
        # Read here only, where every process has read the same scalars: a hook may read more in one of them.
        self._goes_back = self._rollback.is_due
        if self._goes_back:
            return
        if self._island is not None:
            self.state = self._island.after_step(self.state, self.step)
            if self._is_behind:
                return
        self._probing.after_step(self.step)
        requests = self._call_hooks("after_step", is_step_due(self.experiment.log_every, self.step))
        if (is_step_due(self.experiment.evaluate.every, self.step) or requests.evaluate) and not self._ended:
            with self._save_on_error("the evaluation"):
                requests.save |= self._evaluate().save
            # Before another step overwrites the parameters that were evaluated.
            requests.save |= self._checkpoints.record_evaluation(self.step, self._evaluation)
        if (
            not self._ended
            and self._checkpoints.is_due(self.step, requested=requests.save)
            and self._rollback.wait_for_devices()
        ):
            # Only a sound state is saved: the step's scalars are read and checked first.
            self._report.flush()
            with self._report.clock.measure("save"), self._report.ledger.measure("checkpoint wait"):
                self._checkpoints.after_step(
                    self.state, self.step, self._position, self._evaluation, requested=requests.save
                )
            self._report.ledger.record_step(self.step, saved=True)

    def finish(self) -> Result:
        """Evaluate, unless the run was cut off; save; return how it ended."""
        if self._goes_back:
            # The caller has left the loop at a step that does not count.
            del self.state
            self._begin(self._rollback.roll_back(self.step))
        self._report.flush()
        if (self._stopped or self.step == self.experiment.num_steps) and not self._failed and not self._evaluation:
            self._evaluate_at_end()
        self._checkpoints.record_evaluation(self.step, self._evaluation)
        ledger = self._report.ledger
        ledger.record_step(self.step)
        with ledger.measure("checkpoint wait"):
            checkpoint = self._checkpoints.at_end(self.state, self.step, self._position, self._evaluation)
        if (line := self._checkpoints.describe_lost_best()) is not None:
            self.say(line)
        ledger.switch("start")
        self._hook_runner.call("at_end", self)
        self._report.record_data_usage(self.step, self._position)
        self._hook_runner.raise_failure(checkpoint, self._failed)
        # With all its steps a run is done, whatever was requested meanwhile.
        stopped, signal = "", None
        if self.step < self.experiment.num_steps:
            stopped = self._stopped
            signal = None if self._interrupt.signal is None else self._interrupt.signal.name
        reason = f"stopped by {signal}" if signal else f"stopped: {stopped or 'the loop was left'}"
        self._report.end(self.step, "done" if self.step == self.experiment.num_steps else reason)
        self.result = Result(self.prepared, self.state, self.step, self._evaluation, checkpoint, signal, stopped)
        return self.result

    @property
    def _is_behind(self) -> bool:
        """Return True if the other islands have met without this one, which joins them at a later step."""
        return self._island is not None and self._island.ahead is not None

    def _catch_up(self) -> RunStart:
        assert self._island is not None
        self._report.flush()
        own_start = RunStart(
            self.state,
            self.step,
            self._position,
            self._checkpoints.stored_step,
            self._hook_runner.collect_state(self),
            self._rollback.progress,
            best=self._checkpoints.best,
        )
        start = self._island.catch_up(self.state, own_start, self._rollback.skipped_batches)
        self._rollback.progress = start.progress
        return start

    @property
    def _ended(self) -> bool:
        return self.step >= self.experiment.num_steps or bool(self._stopped) or self._failed

    def _call_hooks(self, method: str, agree: bool, *arguments: Any) -> HookRequests:
        """Call the hooks, and act on their requests; with many processes, only at steps at which all of them
        agree on these."""
        if not self._hook_runner:
            return HookRequests()
        with self._report.clock.measure("hooks"):
            self._hook_runner.call(method, self, *arguments)
            if jax.process_count() > 1 and not agree:
                return HookRequests()
            return self._take_requests(self._hook_runner.requests.all_reduce())

    def _take_requests(self, requests: HookRequests) -> HookRequests:
        self._hook_runner.requests = HookRequests()
        self._stopped, self._failed = self._stopped or requests.stop, self._failed or requests.failed
        return requests

    def _evaluate(self) -> HookRequests:
        self._report.flush()
        with self._report.ledger.measure("evaluation"):
            self._evaluation = evaluate_held_out(
                self.prepared, self.state, self.step, self._report, self._interrupt.should_stop
            )
            if not self._evaluation and self._interrupt.signal is not None:
                self.say(f"the evaluation of step {self.step} is abandoned: {self._interrupt.signal.name} received")
            self._report.record_compilation()
            return self._call_hooks("after_evaluation", True, self._evaluation) if self._evaluation else HookRequests()

    def _evaluate_at_end(self) -> None:
        """Evaluate the last state; if that fails, save it first: the steps since the last save are not lost
        with it."""
        try:
            self._evaluate()
        except Exception as error:
            # With many processes another one may not have failed, and would not enter the save's collectives.
            if jax.process_count() == 1 or isinstance(error, LayoutError):
                saved = self._checkpoints.at_end(self.state, self.step, self._position, {})
                self.say(f"the last evaluation failed; step {self.step} is saved: {saved}")
            raise

    # The hooks' view of the run and their requests; see `panax.hooks.RunView`.

    @property
    def values(self) -> Mapping[str, float]:
        return self._report.values

    @property
    def evaluates(self) -> bool:
        return self.prepared.data.held_out is not None and self.experiment.evaluate.every > 0

    @property
    def stopping(self) -> bool:
        # With many processes it is set once they have agreed on a step.
        return self._interrupt.signal is not None

    def read(self) -> Mapping[str, float]:
        self._report.flush()
        return self._report.values

    def log(self, values: Mapping[str, float]) -> None:
        if reserved := RESERVED_NAMES & values.keys():
            raise RecipeError(
                f"run.log: {', '.join(sorted(reserved))} is reserved for the log's step; use another "
                f"name, such as mine/{min(reserved)}"
            )
        self._report.trackers.record(self.step, {name: float(value) for name, value in values.items()})

    def text(self, name: str, text: str) -> None:
        self._report.trackers.text(self.step, name, text)

    def picture(self, name: str, image: Picture) -> None:
        self._report.trackers.picture(self.step, name, image)

    def film(self, name: str, frames: Frames, seconds_per_frame: float) -> None:
        self._report.trackers.film(self.step, name, frames, seconds_per_frame)

    def histogram(self, name: str, histogram: Histogram) -> None:
        self._report.trackers.histogram(self.step, name, histogram)

    def generate(self, prompt: str, **settings: Any) -> str:
        state, tokenizer = self.state, self.prepared.data.tokenizer
        model = TextModel(self.prepared.task, state.eval_params, state.model_state, tokenizer)
        return generate_text(model, prompt, **settings)

    def histograms(self) -> Mapping[str, Histogram]:
        return weight_histograms(self.prepared.step, self.state, self.batch)

    def evaluate(self) -> None:
        self._hook_runner.requests.evaluate = True

    def save(self) -> None:
        self._hook_runner.requests.save = True

    def stop(self, reason: str) -> None:
        self._hook_runner.requests.stop = self._hook_runner.requests.stop or reason or "a hook"


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
