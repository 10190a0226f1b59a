"""A profile of a few steps, on request, for TensorBoard's page of profiles."""

import contextlib
from collections.abc import Callable
from pathlib import Path

import jax

from ...core.errors import TrainingError
from ..opened_data import LogFn

PROFILED_STEPS = 3


class StepProfiler:
    """Writes a profile of some steps."""

    def __init__(self, folder: Path, first: int, say: LogFn):
        """
        Args:
            folder: Folder of TensorBoard's files, in which its page looks for profiles.
            first: First step of the profile; 0 for none.
        """
        self._folder, self._first, self._say = folder, first, say
        self._taken: int | None = None
        self._is_running = False

    def before_step(self, number: int, wait: Callable[[], None]) -> None:
        """Start or end the profile, if it starts or ends at this step.

        Args:
            wait: Waits for the devices.
        """
        if self._first and number >= self._first and self._taken is None:
            wait()
            self._taken = 0
            try:
                jax.profiler.start_trace(str(self._folder))
                self._is_running = True
            except (OSError, RuntimeError) as error:
                self._say(f"warning: no profile is written: {error}")
        elif self._is_running and self._taken is not None:
            self._taken += 1
            if self._taken == PROFILED_STEPS:
                self._end(wait)

    def close(self, wait: Callable[[], None]) -> None:
        """End a profile that is still running, as the run ends."""
        if self._is_running and self._taken is not None:
            self._taken += 1
            self._end(wait)

    def _end(self, wait: Callable[[], None]) -> None:
        with contextlib.suppress(TrainingError):
            wait()
        self._is_running = False
        try:
            jax.profiler.stop_trace()
        except (OSError, RuntimeError) as error:
            self._say(f"warning: the profile can't be written: {error}")
            return
        self._say(f"profile of {self._taken} steps written below {self._folder / 'plugins'}")
