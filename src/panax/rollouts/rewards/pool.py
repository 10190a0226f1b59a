"""`RewardPool`: reward functions, called in processes of this host, so that none of them can stop a run."""

import json
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from ...core.errors import RecipeError, TrainingError
from ...system.host_memory import free_bytes
from .process import WORKER_VARIABLE, CallError, CancelledError, RewardProcess
from .reward import Reward, Verdict, split_location

MAX_PROCESSES = 64

_MIN_MEMORY_BYTES = 1 << 30
_SECONDS_TO_END = 2.0
_WAIT_SECONDS = 0.25


class RewardPool:
    """Processes that rate answers until `close`, or until this object or program ends.

    Each process imports the rewards' functions once. It receives answers and records as JSON and replies with
    numbers; nothing is pickled, and nothing listens on a port. A function that raises, returns no finite number, or
    does not return in time fails for that answer alone; a process that does not survive a call is killed with
    everything that it has started, and another takes its place, which imports the modules again.

    Attributes:
        rewards: The rewards, in the order of the verdicts of an answer.
    """

    def __init__(self, rewards: Sequence[Reward], processes: int = 2, *, memory_bytes: int | None = None):
        """Start the processes, and wait until each has imported the functions.

        Args:
            processes: Number of answers that are rated at once, 1 to 64.
            memory_bytes: Maximum size of a process's data; by default an equal share of the free memory of the host,
                and at least 1 GiB.

        Raises:
            RecipeError: A function can't be imported, with the last lines of the traceback; or the arguments are
                invalid.
        """
        self.rewards = tuple(rewards)
        self._check(processes)
        if memory_bytes is None:
            memory_bytes = max(_MIN_MEMORY_BYTES, free_bytes() // (processes + 1))
        set_up = {
            "functions": [_absolute(reward.location) for reward in self.rewards],
            "memory_bytes": memory_bytes,
            "python_path": os.environ.get("PYTHONPATH"),
        }
        self._lock = threading.Lock()
        self._processes = [RewardProcess(set_up) for _ in range(processes)]
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

    def score(
        self,
        answers: Sequence[tuple[str, Mapping[str, Any]]],
        *,
        stop_at_failure: bool = False,
        on_wait: Callable[[], None] = lambda: None,
    ) -> list[list[Verdict]]:
        """Rate answers with every reward; the order of the verdicts does not depend on which process is faster.

        Args:
            answers: Texts, each with the record of its prompt.
            stop_at_failure: True to begin no further call once a function has failed, for instance if it hangs for
                every answer. The first error in the result is that of a function that was called.
            on_wait: Called several times a second until all answers are rated; if it raises, the calls that run are given up.

        Returns:
            For each answer, one verdict for each reward.

        Raises:
            TrainingError: The pool is closed, or a process can't be started again.
        """
        with self._lock:
            if self.closed:
                raise TrainingError("the pool of reward functions is closed; create another")
            scoring = _Scoring(self.rewards, answers, stop_at_failure)
            threads = [
                threading.Thread(target=scoring.work, args=(process,), daemon=True)
                for process in self._processes[: len(scoring.verdicts) * len(self.rewards)]
            ]
            try:
                for thread in threads:
                    thread.start()
                for thread in threads:
                    while thread.is_alive():
                        thread.join(_WAIT_SECONDS)
                        on_wait()
            except BaseException:  # Ctrl-C: the calls that run are given up, and their processes killed
                scoring.cancel()
                for thread in threads:
                    if thread.ident is not None:
                        thread.join()
                raise
        return scoring.result()

    def close(self) -> None:
        """End the processes; kill those that don't end by themselves."""
        self._end()

    def __enter__(self) -> "RewardPool":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _check(self, processes: int) -> None:
        if os.environ.get(WORKER_VARIABLE):
            raise RecipeError(
                "a file with reward functions starts a run when it is imported; move the code that runs it under "
                'if __name__ == "__main__":'
            )
        if not 1 <= processes <= MAX_PROCESSES:
            raise RecipeError(f"processes={processes}: expected 1 to {MAX_PROCESSES} processes for reward functions")
        names = [reward.name for reward in self.rewards]
        for name in names:
            if names.count(name) > 1:
                raise RecipeError(f"{names.count(name)} rewards are called {name!r}; give each its own Reward.name")


class _Scoring:
    """The calls of one `score`, which the threads of all processes take in turn.

    Attributes:
        verdicts: For each answer, one verdict for each reward.
    """

    def __init__(
        self, rewards: Sequence[Reward], answers: Sequence[tuple[str, Mapping[str, Any]]], stop_at_failure: bool
    ):
        self.verdicts: list[list[Verdict | None]] = [[None] * len(rewards) for _ in answers]
        self._rewards, self._answers = rewards, answers
        self._next = self._calls()
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._stop_at_failure, self._has_failed = stop_at_failure, False
        self._error: BaseException | None = None

    def work(self, process: RewardProcess) -> None:
        """Make calls in one process until none is left."""
        try:
            while (call := self._take()) is not None:
                answer, number, content = call
                self.verdicts[answer][number] = self._rate(process, number, content)
        except CancelledError:
            pass
        except BaseException as error:  # raised again by `result`
            self._error = self._error or error
            self.cancel()

    def cancel(self) -> None:
        """Make all threads end soon."""
        self._stop.set()

    def result(self) -> list[list[Verdict]]:
        """Return all verdicts.

        Raises:
            TrainingError: A process could not be started again.
        """
        if self._error is not None:
            raise self._error
        return [
            [
                Verdict(None, f"reward {reward.name} was not called, since another call failed")
                if verdict is None
                else verdict
                for reward, verdict in zip(self._rewards, row)
            ]
            for row in self.verdicts
        ]

    def _take(self) -> tuple[int, int, str | ValueError] | None:
        with self._lock:
            is_over = self._stop.is_set() or (self._has_failed and self._stop_at_failure)
            return None if is_over else next(self._next, None)

    def _calls(self) -> Iterator[tuple[int, int, str | ValueError]]:
        for index, (answer, record) in enumerate(self._answers):
            content: str | ValueError
            try:
                content = f'"answer": {json.dumps(answer)}, "record": {json.dumps(dict(record))}'
            except (TypeError, ValueError, RecursionError) as error:
                content = ValueError(f"was not called: its record is not JSON: {error}")
            for number in range(len(self._rewards)):
                yield index, number, content

    def _rate(self, process: RewardProcess, number: int, content: str | ValueError) -> Verdict:
        reward = self._rewards[number]
        try:
            if isinstance(content, ValueError):
                raise CallError(str(content))
            return Verdict(process.call(number, content, reward.seconds, self._stop.is_set))
        except CallError as error:
            self._has_failed = True
            return Verdict(None, f"reward {reward.name} {error}")


def _absolute(where: str) -> str:
    source, name = split_location(where)
    return f"{Path(source).absolute()}:{name}" if source.endswith(".py") else where


def _end(processes: Sequence[RewardProcess]) -> None:
    for process in processes:
        process.close()
    last = time.monotonic() + _SECONDS_TO_END
    for process in processes:
        process.kill(max(0.0, last - time.monotonic()))
