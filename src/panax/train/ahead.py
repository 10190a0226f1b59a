"""Programs that are compiled in threads of their own, while the run draws its first state or reads it."""

import concurrent.futures
import contextvars
from collections.abc import Callable, Hashable
from typing import Any


class Ahead:
    """Makes things in two threads. Whoever asks for one waits for it, and gets the error that it ended with."""

    def __init__(self) -> None:
        self._made: dict[Hashable, concurrent.futures.Future[Any]] = {}
        self._threads: concurrent.futures.ThreadPoolExecutor | None = None

    def begin(self, name: Hashable, make: Callable[[], Any]) -> None:
        """Make this meanwhile. What has this name already is not made again."""
        if name in self._made:
            return
        self._threads = self._threads or concurrent.futures.ThreadPoolExecutor(2, thread_name_prefix="panax-compile")
        # What is in force here is in force there.
        self._made[name] = self._threads.submit(contextvars.copy_context().run, make)

    def made(self, name: Hashable, make: Callable[[], Any]) -> Any:
        """What was begun under this name, once; made here where nothing was."""
        begun = self._made.pop(name, None)
        # One that has not begun may stand behind others that nobody asks for.
        return make() if begun is None or begun.cancel() else begun.result()
