"""Hooks of one run: called in order, identified by name; one that raises ends the run, which saves first."""

import dataclasses
import json
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

import jax

from ...core.errors import HookError, PanaxError, RecipeError
from ...hooks import Hook, RunView
from ...job.agreement import gather_ints
from ...metrics import StepClock
from ..experiment import Experiment
from .phases import RunEvent, RunPhase
from .run_part import RunPart, RunProgress, is_step_due
from .run_start import RunStart

REQUESTED_ELSEWHERE = "another process asked for it"


@dataclasses.dataclass(frozen=True)
class HookFailure:
    """Exception that a hook raised, with the hook, the method and the step."""

    hook: str
    method: str
    step: int
    error: BaseException


@dataclasses.dataclass
class HookRequests:
    """Requests of hooks since they were last read.

    Attributes:
        stop: Why the run should end; empty if no hook requested it.
        failed: True if a hook raised.
    """

    evaluate: bool = False
    save: bool = False
    stop: str = ""
    failed: bool = False

    def all_reduce(self) -> "HookRequests":
        """Return the requests of all processes combined: each of them calls this at the same step."""
        if jax.process_count() == 1:
            return self
        gathered = gather_ints(self.evaluate, self.save, bool(self.stop), self.failed)
        evaluate, save, stop, failed = (bool(column.any()) for column in gathered.T)
        return HookRequests(evaluate, save, (self.stop or REQUESTED_ELSEWHERE) if stop else "", failed)


class HookRunner(RunPart):
    """The hooks of one run, with their requests and failures.

    Attributes:
        requests: The requests so far.
        failure: The first exception of a hook; that hook is not called again. The others are, until the run
            ends: in a job of many processes they may contain collectives that every process must enter.
    """

    def __init__(self, experiment: Experiment, view: RunView, clock: StepClock):
        """
        Args:
            view: The run as hooks see it.
        """
        self._hooks, self._view, self._clock = dict(_names(experiment.hooks)), view, clock
        self._log_every = experiment.log_every
        self.requests = HookRequests()
        self.failure: HookFailure | None = None
        self._broken: set[str] = set()

    def begin(self, run: RunProgress, start: RunStart) -> None:
        """Restore each hook and call its `before_run`. Nothing is lost yet, so exceptions are raised at once.

        Raises:
            RecipeError: A hook does not fit the run.
            HookError: A hook raised something else.
        """
        for name, hook in self._hooks.items():
            try:
                hook.restore(start.hooks.get(name))
                hook.before_run(self._view)
            except PanaxError as error:
                raise RecipeError(f"hook {name}: {error}") from error
            except Exception as error:
                raise HookError(f"hook {name} raised before the first step: {_said(error)}") from error
        self._take_requests(run)

    def after_step(self, run: RunProgress) -> None:
        """Call the hooks, and record their requests; with many processes, only at steps at which all of them
        agree on these."""
        self._call_timed("after_step")
        if jax.process_count() == 1 or is_step_due(self._log_every, run.step):
            self._take_requests(run)

    def after_evaluation(self, run: RunProgress) -> None:
        self._call_timed("after_evaluation", run.evaluation)
        self._take_requests(run)

    def to_host(self, run: RunProgress) -> Mapping[str, Any]:
        states = self.collect_state()
        return {"hooks": states} if states else {}

    def call(self, method: str, *arguments: Any) -> None:
        """Call one method of each hook. A second Ctrl-C inside counts as its exception: the run saves
        first."""
        for name, hook in self._hooks.items():
            if name in self._broken:
                continue
            try:
                getattr(hook, method)(self._view, *arguments)
            except (Exception, KeyboardInterrupt) as error:
                self._fail(name, method, error)

    def _call_timed(self, method: str, *arguments: Any) -> None:
        """Call one method of each hook, and measure its time, if there are hooks."""
        if self._hooks:
            with self._clock.measure("hooks"):
                self.call(method, *arguments)

    def _take_requests(self, run: RunProgress) -> None:
        """Record the requests of the hooks, or of a custom loop, of all processes in the run's progress."""
        requests, self.requests = self.requests.all_reduce(), HookRequests()
        run.must_evaluate |= requests.evaluate
        run.must_save |= requests.save
        run.stop_reason = run.stop_reason or requests.stop
        if requests.failed:
            run.handle(RunEvent.HOOK_FAILED)
        elif requests.stop:
            run.handle(RunEvent.STOP_REQUESTED)

    def collect_state(self) -> dict[str, Any]:
        """Return the state of each hook for a checkpoint, after its `before_save`."""
        self.call("before_save")
        states = {}
        for name, hook in self._hooks.items():
            try:
                state = hook.state()
                json.dumps(state, allow_nan=False)
            except (Exception, KeyboardInterrupt) as error:
                self._fail(name, "state", error)
            else:
                if state is not None:
                    states[name] = state
        return states

    def raise_failure(self, checkpoint: str, phase: RunPhase) -> None:
        """Raise the exception of a hook, now that the run has saved.

        Args:
            phase: The run's phase, on which the processes have agreed.

        Raises:
            HookError: A hook failed; the message names the hook and the checkpoint.
        """
        if self.failure is None:
            if phase is RunPhase.FAILED:
                raise HookError(
                    f"a hook raised in another process, and the run was ended: its output names the hook\n"
                    f"saved {checkpoint}; the same command resumes from there"
                )
            return
        name, error = self.failure.hook, self.failure.error
        if isinstance(error, KeyboardInterrupt):
            raise error
        raise HookError(
            f"hook {name} raised in {self.failure.method} after step {self.failure.step}, and the run was ended: {_said(error)}\n"
            f"saved {checkpoint}; mend or remove the hook, and the same command resumes from there"
        ) from error

    def _fail(self, name: str, method: str, error: BaseException) -> None:
        self._broken.add(name)
        self.failure = self.failure or HookFailure(name, method, self._view.step, error)
        self.requests.failed = True


def _said(error: BaseException) -> str:
    return str(error) if isinstance(error, PanaxError) else f"{type(error).__name__}: {error}"


def _names(hooks: tuple[Hook, ...]) -> Iterator[tuple[str, Hook]]:
    """Yield each hook with the name of its state: its class name, numbered from the second of a class on."""
    counts: Counter[str] = Counter()
    for hook in hooks:
        name = type(hook).__name__
        counts[name] += 1
        yield (name if counts[name] == 1 else f"{name}-{counts[name]}"), hook
