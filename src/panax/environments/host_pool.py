"""`HostPool`: gymnasium's environments, stepped side by side by processes of this host, seen as arrays."""

import contextlib
import os
import subprocess
import sys
import threading
import weakref
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from ..core.errors import RecipeError, TrainingError
from .host_worker import read, write
from .importing import Setting

MOST_PROCESSES = 64

_SECONDS_TO_BEGIN, _SECONDS_TO_END = 60.0, 2.0


class Stepped(NamedTuple):
    """What one step of all environments yields; every array has one row for each.

    Attributes:
        final_observation: What the step led to, before any reset.
        observation: What is seen now: of the next episode where one ended.
    """

    final_observation: np.ndarray
    observation: np.ndarray
    reward: np.ndarray
    terminated: np.ndarray
    truncated: np.ndarray


class HostPool:
    """`count` environments in up to `processes` processes, which live until `close`, or until this object or program ends.

    Each process is told an id and settings as JSON, and answers with arrays; nothing is pickled, and nothing listens on a port.
    An environment that raises, or whose process dies or does not answer, closes the pool with one message.

    Attributes:
        spaces: Of one environment, as JSON.
    """

    def __init__(
        self, name: str, count: int, *, processes: int, settings: Mapping[str, Setting], timeout_seconds: float
    ):
        """Start the processes, and wait until each has made its environments.

        Raises:
            RecipeError: gymnasium can't make such an environment; with its own words.
        """
        self._name, self._timeout = name, timeout_seconds
        self._shares = [len(part) for part in np.array_split(np.arange(count), min(processes, count, MOST_PROCESSES))]
        self._lock = threading.Lock()
        self._late = False
        self._processes = [
            subprocess.Popen(
                [sys.executable, "-m", "panax.environments.host_worker"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                env=_environment(),
            )
            for _ in self._shares
        ]
        self._end = weakref.finalize(self, _end, self._processes)
        try:
            told = [{"id": name, "settings": dict(settings), "count": share} for share in self._shares]
            self.spaces = self._ask(told, seconds=max(timeout_seconds, _SECONDS_TO_BEGIN))[0][0]
        except TrainingError as error:
            raise RecipeError(f"gymnasium can't make {name!r}: {error}") from error

    @property
    def count(self) -> int:
        return sum(self._shares)

    @property
    def closed(self) -> bool:
        return not self._end.alive

    def reset(self, seeds: Sequence[int]) -> np.ndarray:
        """Begin an episode in each environment; the observations.

        Raises:
            TrainingError: An environment raised, or a process died.
        """
        parts = self._ask([{"do": "reset", "seeds": part} for part in self._parts(list(seeds))])
        return np.concatenate([arrays[0] for _, arrays in parts])

    def step(self, actions: np.ndarray, seeds: Sequence[int]) -> Stepped:
        """One step in each environment; where an episode ends, another one begins.

        Args:
            seeds: Of the episodes that begin.

        Raises:
            TrainingError: An environment raised, or a process died.
        """
        told = [{"do": "step", "seeds": part} for part in self._parts(list(seeds))]
        parts = self._ask(told, self._parts(actions))
        return Stepped(*(np.concatenate(column) for column in zip(*(arrays for _, arrays in parts))))

    def close(self) -> None:
        """End the processes: those that don't end by themselves are killed."""
        self._end()

    def _parts(self, rows: Any) -> list[Any]:
        ends = np.cumsum(self._shares)
        return [rows[end - share : end] for share, end in zip(self._shares, ends)]

    def _ask(
        self,
        told: Sequence[Mapping[str, Any]],
        arrays: Sequence[np.ndarray] | None = None,
        seconds: float | None = None,
    ) -> list[tuple[dict[str, Any], list[np.ndarray]]]:
        """Tell every process something, then read what each answers."""
        with self._lock:
            if self.closed:
                raise TrainingError(f"the environments of {self._name} are closed")
            # A process that hangs is killed, and its pipe ends: reading then says so.
            late = threading.Timer(seconds or self._timeout, self._give_up)
            late.daemon = True
            late.start()
            try:
                for number, process in enumerate(self._processes):
                    assert process.stdin is not None
                    with contextlib.suppress(BrokenPipeError):  # Of a process that died: found below.
                        write(process.stdin, told[number], () if arrays is None else (arrays[number],))
                return [self._answer(number) for number in range(len(self._processes))]
            except BaseException:
                self.close()
                raise
            finally:
                late.cancel()

    def _answer(self, number: int) -> tuple[dict[str, Any], list[np.ndarray]]:
        process = self._processes[number]
        assert process.stdout is not None
        try:
            head, arrays = read(process.stdout)
        except EOFError:
            if self._late:
                raise TrainingError(
                    f"an environment of {self._name} has not answered for {self._timeout:g} seconds; look at what it waits for, "
                    f"or raise timeout_seconds"
                ) from None
            raise TrainingError(
                f"process {number} of the environments of {self._name} died (exit code {process.wait()}); what it said last is "
                f"on stderr"
            ) from None
        if not head["ok"]:
            raise TrainingError(f"an environment of {self._name} raised {head['error']}")
        return head, arrays

    def _give_up(self) -> None:
        self._late = True
        for process in self._processes:
            process.kill()


def _environment() -> dict[str, str]:
    """Of a worker: it finds modules where this process does, and one thread does for an environment."""
    threads = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
    folders = [str(Path(__file__).parents[2]), *(folder for folder in sys.path if folder)]
    return {**os.environ, **threads, "PYTHONPATH": os.pathsep.join(folders)}


def _end(processes: Sequence[subprocess.Popen]) -> None:
    for process in processes:
        for pipe in (process.stdin, process.stdout):
            with contextlib.suppress(OSError):
                assert pipe is not None
                pipe.close()
    for process in processes:
        try:
            process.wait(_SECONDS_TO_END)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
