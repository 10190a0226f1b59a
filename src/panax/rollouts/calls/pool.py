"""`CallPool`: users' functions, called in processes of this host, so that none of them can stop a run."""

import json
import threading
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from ...core.errors import RecipeError, TrainingError
from ...system.host_memory import free_bytes
from .process import CallError, CallProcess, CancelledError, make_set_up, refuse_in_worker

MAX_PROCESSES = 64

NOT_CALLED = "was not called, since another call failed"

_MIN_MEMORY_BYTES = 1 << 30
_SECONDS_TO_END = 2.0
_WAIT_SECONDS = 0.25


class CalledFunction(NamedTuple):
    """A function of a pool.

    Attributes:
        location: "module:name" or "folder/file.py:name".
        kind: Its kind, of `KINDS`.
        seconds: Time limit of one call.
    """

    location: str
    kind: str
    seconds: float


class Call(NamedTuple):
    """A call to make.

    Attributes:
        arguments: JSON values by name, as the function's kind takes them.
    """

    function: CalledFunction
    arguments: Mapping[str, Any]


class Outcome(NamedTuple):
    """Result of one call.

    Attributes:
        value: The returned value, as JSON; None if it failed.
        error: Reason of a failure, as a predicate of the function; empty otherwise.
    """

    value: Any
    error: str = ""


class CallPool:
    """Processes that call functions until `close`, or until this object or program ends.

    Each process imports the functions once. It receives arguments as JSON and replies with JSON; nothing is pickled, and
    nothing listens on a port. A function that raises, returns a value of another kind, or does not return in time fails for
    that call alone; a process that does not survive a call is killed with everything that it has started, and another
    takes its place, which imports the modules again.
    """

    def __init__(
        self, functions: Sequence[CalledFunction], processes: int = 2, *, memory_bytes: int | None = None
    ) -> None:
        """Start the processes, and wait until each has imported the functions.

        Args:
            functions: All that are called.
            processes: Number of calls that run at once, 1 to 64.
            memory_bytes: Maximum size of a process's data; by default an equal share of the free memory of the host,
                and at least 1 GiB.

        Raises:
            RecipeError: A function can't be imported, with the last lines of the traceback; or the arguments are
                invalid.
        """
        refuse_in_worker()
        if not 1 <= processes <= MAX_PROCESSES:
            raise RecipeError(f"processes={processes}: expected 1 to {MAX_PROCESSES} processes for functions")
        if memory_bytes is None:
            memory_bytes = max(_MIN_MEMORY_BYTES, free_bytes() // (processes + 1))
        self._numbers = {function: number for number, function in enumerate(dict.fromkeys(functions))}
        set_up = make_set_up([(each.location, each.kind) for each in self._numbers], memory_bytes)
        self._lock = threading.Lock()
        self._processes = [CallProcess(set_up) for _ in range(processes)]
        self._end = weakref.finalize(self, _end, self._processes)
        try:
            for process in self._processes:
                process.launch()
            for process in self._processes:
                process.confirm()
        except TrainingError as error:
            self.close()
            raise RecipeError(str(error)) from error
        except BaseException:
            self.close()
            raise

    @property
    def closed(self) -> bool:
        return not self._end.alive

    def run(
        self,
        calls: Sequence[Call],
        *,
        stop_at_failure: bool = False,
        on_wait: Callable[[], None] = lambda: None,
    ) -> list[Outcome]:
        """Make calls; the order of the outcomes does not depend on which process is faster.

        Args:
            calls: Calls of the pool's functions.
            stop_at_failure: True to begin no further call once a function has failed, for instance if it hangs each time.
            on_wait: Called several times a second until all calls are done; if it raises, those that run are given up.

        Raises:
            TrainingError: The pool is closed, or a process can't be started again.
        """
        with self._lock:
            if self.closed:
                raise TrainingError("the pool of functions is closed; create another")
            running = _RunningCalls(self._numbers, calls, stop_at_failure)
            threads = [
                threading.Thread(target=running.work, args=(process,), daemon=True)
                for process in self._processes[: len(calls)]
            ]
            try:
                for thread in threads:
                    thread.start()
                for thread in threads:
                    while thread.is_alive():
                        thread.join(_WAIT_SECONDS)
                        on_wait()
            except BaseException:  # Ctrl-C: the calls that run are given up, and their processes killed
                running.cancel()
                for thread in threads:
                    if thread.ident is not None:
                        thread.join()
                raise
        return running.result()

    def close(self) -> None:
        """End the processes; kill those that don't end by themselves."""
        self._end()

    def __enter__(self) -> "CallPool":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class _RunningCalls:
    """The calls of one `run`, which the threads of all processes take in turn."""

    def __init__(self, numbers: Mapping[CalledFunction, int], calls: Sequence[Call], stop_at_failure: bool):
        self._numbers, self._calls = numbers, calls
        self._outcomes: list[Outcome | None] = [None] * len(calls)
        self._next = iter(range(len(calls)))
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._stop_at_failure, self._has_failed = stop_at_failure, False
        self._error: BaseException | None = None

    def work(self, process: CallProcess) -> None:
        """Make calls in one process until none is left."""
        try:
            while (place := self._take()) is not None:
                self._outcomes[place] = self._call(process, self._calls[place])
        except CancelledError:
            pass
        except BaseException as error:  # raised again by `result`
            self._error = self._error or error
            self.cancel()

    def cancel(self) -> None:
        """Make all threads end soon."""
        self._stop.set()

    def result(self) -> list[Outcome]:
        """Return all outcomes.

        Raises:
            TrainingError: A process could not be started again.
        """
        if self._error is not None:
            raise self._error
        return [Outcome(None, NOT_CALLED) if outcome is None else outcome for outcome in self._outcomes]

    def _take(self) -> int | None:
        with self._lock:
            is_over = self._stop.is_set() or (self._has_failed and self._stop_at_failure)
            return None if is_over else next(self._next, None)

    def _call(self, process: CallProcess, call: Call) -> Outcome:
        try:
            try:
                arguments = json.dumps(dict(call.arguments))
            except (TypeError, ValueError, RecursionError) as error:
                raise CallError(f"was not called: its record, or another argument, is not JSON: {error}") from error
            number = self._numbers[call.function]
            return Outcome(process.call(number, arguments, call.function.seconds, self._stop.is_set))
        except CallError as error:
            self._has_failed = True
            return Outcome(None, str(error))


def _end(processes: Sequence[CallProcess]) -> None:
    for process in processes:
        process.close()
    last = time.monotonic() + _SECONDS_TO_END
    for process in processes:
        process.kill(max(0.0, last - time.monotonic()))
