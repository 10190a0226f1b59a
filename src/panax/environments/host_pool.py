"""`HostPool`: gymnasium's environments, stepped in parallel by processes of this host, with arrays as
interface."""

import contextlib
import os
import sys
import threading
import time
import weakref
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from ..core.errors import RecipeError, TrainingError
from ..system.children import PipedProcess
from .host_worker import MAX_LINE_BYTES, encode_message, num_bytes, parse_message
from .imports import Setting

MAX_PROCESSES = 64

_SECONDS_TO_BEGIN, _SECONDS_TO_END = 60.0, 2.0


class BatchStep(NamedTuple):
    """Result of one step of all environments; every array has one row for each.

    Attributes:
        final_observation: Observation after the step, before any reset.
        observation: Current observation: that of the next episode if one ended.
    """

    final_observation: np.ndarray
    observation: np.ndarray
    reward: np.ndarray
    terminated: np.ndarray
    truncated: np.ndarray


class HostPool:
    """`count` environments in up to `processes` processes, which run until `close`, or until this object or
    program ends.

    Each process receives an id and settings as JSON, and answers with arrays; nothing is pickled, and nothing
    listens on a port. An environment that raises an error, or a process that dies or does not answer, closes
    the pool with one message.

    Attributes:
        spaces: Spaces of one environment, as JSON.
    """

    def __init__(
        self, name: str, count: int, *, processes: int, settings: Mapping[str, Setting], timeout_seconds: float
    ):
        """Start the processes, and wait until each has created its environments.

        Raises:
            RecipeError: gymnasium can't create such an environment; the message includes its error.
        """
        self._name, self._timeout = name, timeout_seconds
        self._counts = [len(part) for part in np.array_split(np.arange(count), min(processes, count, MAX_PROCESSES))]
        self._lock = threading.Lock()
        command = [sys.executable, "-m", "panax.environments.host_worker"]
        self._processes: list[PipedProcess] = []
        self._end = weakref.finalize(self, _end, self._processes)
        try:
            for _ in self._counts:
                self._processes.append(PipedProcess(command, _environment()))
            requests = [
                {"id": name, "settings": dict(settings), "count": count_of_process} for count_of_process in self._counts
            ]
            self.spaces = self._ask(requests, seconds=max(timeout_seconds, _SECONDS_TO_BEGIN))[0][0]
        except TrainingError as error:
            raise RecipeError(f"gymnasium can't make {name!r}: {error}") from error

    @property
    def count(self) -> int:
        return sum(self._counts)

    @property
    def closed(self) -> bool:
        return not self._end.alive

    def reset(self, seeds: Sequence[int]) -> np.ndarray:
        """Begin an episode in each environment; return the observations.

        Raises:
            TrainingError: An environment raised an error, or a process died.
        """
        answers = self._ask([{"do": "reset", "seeds": part} for part in self._split(list(seeds))])
        return np.concatenate([arrays[0] for _, arrays in answers])

    def step(self, actions: np.ndarray, seeds: Sequence[int]) -> BatchStep:
        """Take one step in each environment; if an episode ends, another one begins.

        Args:
            seeds: Seeds of the episodes that begin.

        Raises:
            TrainingError: An environment raised an error, or a process died.
        """
        requests = [{"do": "step", "seeds": part} for part in self._split(list(seeds))]
        answers = self._ask(requests, self._split(actions))
        return BatchStep(*(np.concatenate(column) for column in zip(*(arrays for _, arrays in answers))))

    def fault(self) -> str:
        """Return the error of an episode's first step, as text; empty if there is none. An error ends the
        processes."""
        try:
            self._ask([{"do": "try"} for _ in self._counts])
        except TrainingError as error:
            return str(error)
        return ""

    def close(self) -> None:
        """End the processes; kill those that don't end by themselves."""
        self._end()

    def _split(self, rows: Any) -> list[Any]:
        ends = np.cumsum(self._counts)
        return [rows[end - count : end] for count, end in zip(self._counts, ends)]

    def _ask(
        self,
        requests: Sequence[Mapping[str, Any]],
        arrays: Sequence[np.ndarray] | None = None,
        seconds: float | None = None,
    ) -> list[tuple[dict[str, Any], list[np.ndarray]]]:
        """Send a message to every process, then read the answer of each."""
        with self._lock:
            if self.closed:
                raise TrainingError(f"the environments of {self._name} are closed")
            seconds = seconds or self._timeout
            try:
                for number, process in enumerate(self._processes):
                    with contextlib.suppress(EOFError):  # of a process that died: detected below
                        process.write(
                            encode_message(requests[number], () if arrays is None else (arrays[number],)), seconds
                        )
                return [self._answer(number, seconds) for number in range(len(self._processes))]
            except TimeoutError:
                for process in self._processes:
                    process.kill()
                self.close()
                raise TrainingError(
                    f"an environment of {self._name} has not answered for {seconds:g} seconds; check why it waits, "
                    f"or raise timeout_seconds"
                ) from None
            except BaseException:
                self.close()
                raise

    def _answer(self, number: int, seconds: float) -> tuple[dict[str, Any], list[np.ndarray]]:
        process = self._processes[number]
        try:
            head, expected = parse_message(process.read_line(MAX_LINE_BYTES, seconds))
            arrays = [
                np.frombuffer(process.read_exactly(num_bytes(dtype, shape), seconds), dtype).reshape(shape)
                for dtype, shape in expected
            ]
        except EOFError:
            raise TrainingError(
                f"process {number} of the environments of {self._name} died (exit code {process.end(_SECONDS_TO_END)}); see its "
                f"last output on stderr"
            ) from None
        except ValueError as error:
            raise TrainingError(
                f"process {number} of the environments of {self._name} sent an invalid answer: {error}; check that the "
                f"environment writes to none of its process's pipes"
            ) from error
        if head.get("ok") is not True:
            raise TrainingError(f"an environment of {self._name} raised {head.get('error')}")
        return head, arrays


def _environment() -> dict[str, str]:
    """Return a worker's environment: it finds modules where this process does, and uses one thread per
    environment."""
    threads = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
    folders = [str(Path(__file__).parents[2]), *(folder for folder in sys.path if folder)]
    return {**os.environ, **threads, "PYTHONPATH": os.pathsep.join(folders)}


def _end(processes: Sequence[PipedProcess]) -> None:
    for process in processes:
        process.close()
    last = time.monotonic() + _SECONDS_TO_END
    for process in processes:
        process.end(max(0.0, last - time.monotonic()))
