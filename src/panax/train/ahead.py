"""Programs that are compiled in a thread of their own, while the run draws its first state or reads it."""

import concurrent.futures
import contextvars
from collections.abc import Callable, Hashable
from typing import Any


class Ahead:
    """Makes one thing after another in a thread. Whoever asks for one waits for it, and gets the error that it ended with."""

    def __init__(self) -> None:
        self._made: dict[Hashable, concurrent.futures.Future[Any]] = {}
        self._thread: concurrent.futures.ThreadPoolExecutor | None = None

    def begin(self, name: Hashable, make: Callable[[], Any]) -> None:
        """Make this after what was begun before. What has this name already is not made again."""
        if name in self._made:
            return
        self._thread = self._thread or concurrent.futures.ThreadPoolExecutor(1, thread_name_prefix="panax-compile")
        # What is in force here is in force there.
        self._made[name] = self._thread.submit(contextvars.copy_context().run, make)

    def made(self, name: Hashable, make: Callable[[], Any]) -> Any:
        """What was begun under this name, once; made here where nothing was."""
        begun = self._made.pop(name, None)
        # One that has not begun may stand behind others that nobody asks for.
        return make() if begun is None or begun.cancel() else begun.result()
