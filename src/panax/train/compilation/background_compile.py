"""Background compilation of programs while the run initializes or restores its state."""

import concurrent.futures
import contextvars
from collections.abc import Callable, Hashable
from typing import Any


class BackgroundBuilder:
    """A queue of named jobs run in order in a background thread; requesting a result waits for it and
    re-raises its error."""

    def __init__(self) -> None:
        self._made: dict[Hashable, concurrent.futures.Future[Any]] = {}
        self._thread: concurrent.futures.ThreadPoolExecutor | None = None

    def begin(self, name: Hashable, make: Callable[[], Any]) -> None:
        """Queue a job after those queued before; a name that is already queued is ignored."""
        if name in self._made:
            return
        self._thread = self._thread or concurrent.futures.ThreadPoolExecutor(1, thread_name_prefix="panax-compile")
        # Run with a copy of the current context variables.
        self._made[name] = self._thread.submit(contextvars.copy_context().run, make)

    def get_or_make(self, name: Hashable, make: Callable[[], Any]) -> Any:
        """Take the result of the named job; without such a job, run `make` now."""
        begun = self._made.pop(name, None)
        # If the job has not started, cancel it and run it here: it may be queued behind jobs that are not needed.
        return make() if begun is None or begun.cancel() else begun.result()
