"""Prefetching of batches in a background thread, so that the devices don't wait for the data."""

import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from types import TracebackType
from typing import Any, Generic, TypeVar

import numpy as np

from panax.core.errors import RecipeError

Item = TypeVar("Item")
_JOIN_SECONDS = 10.0
_ASK_SECONDS = 0.5


class PrefetchIterator(Generic[Item]):
    """An iterator with its next items drawn ahead.

    Its thread ends with the items, at an error, on `close`, and when this object is dropped.

    Attributes:
        seconds_waited: How long `next` has waited for items, in total.
        should_stop: Called twice a second while waiting for an item: a true result ends the wait and the
            iteration.
    """

    should_stop: Callable[[], bool] | None = None

    def __init__(self, iterable: Iterable[Item], size: int) -> None:
        if size < 1:
            raise RecipeError(f"prefetch size={size}; expected at least 1")
        self.seconds_waited = 0.0
        self._is_awaited = True
        self._ahead = _Ahead(size)
        # The thread only references shared state, so that this object can be dropped while it runs.
        self._thread = threading.Thread(
            target=_fill, args=(iter(iterable), self._ahead), name="panax-prefetch", daemon=True
        )
        self._stop = weakref.finalize(self, self._ahead.stop)
        self._thread.start()

    def __iter__(self) -> Iterator[Item]:
        return self

    def __next__(self) -> Item:
        started = time.perf_counter()
        try:
            item = self._ahead.take(self._gives_up)
        except BaseException:  # also Ctrl-C while waiting
            self.close()
            raise
        finally:
            self.seconds_waited += time.perf_counter() - started
        return item

    @property
    def is_late(self) -> bool:
        """Return True if `next` would have to wait."""
        return self._ahead.is_empty

    def _gives_up(self) -> bool:
        given_up = self.should_stop is not None and self.should_stop()
        self._is_awaited = self._is_awaited and not given_up
        return given_up

    def close(self) -> None:
        """Stop drawing, and wait until the thread has ended: once, for at most ten seconds, if it is stuck in
        the source.

        If `should_stop` has ended a wait, this does not wait for the thread, to leave time for the last checkpoint.
        """
        self._stop()
        if self._is_awaited and threading.current_thread() is not self._thread:
            self._is_awaited = False
            self._thread.join(_JOIN_SECONDS)

    def __enter__(self) -> "PrefetchIterator[Item]":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def prefetch(iterable: Iterable[Item], size: int = 2) -> PrefetchIterator[Item]:
    """Iterate over `iterable` with up to `size` items drawn ahead by a background thread.

    An exception in the source is raised in place of its item, with the traceback of the thread. Arrays in an
    item (alone, or in mappings, tuples and lists) are copied, since a loader may reuse the memory for the
    next one.

    >>> with prefetch(range(3)) as items:
    ...     list(items)
    [0, 1, 2]
    """
    return PrefetchIterator(_owned(iterable), size)


def _owned(iterable: Iterable[Any]) -> Iterator[Any]:
    iterator = iter(iterable)
    try:
        for item in iterator:
            yield _copy_arrays(item)
    finally:
        close = getattr(iterator, "close", None)
        if close is not None:
            close()


def _copy_arrays(item: Any) -> Any:
    """Copy the arrays of an item, so that nothing else writes to them."""
    torch = sys.modules.get("torch")
    if isinstance(item, np.ndarray):
        return item.copy()
    if torch is not None and isinstance(item, torch.Tensor):
        return item.clone()
    if isinstance(item, dict):
        return {name: _copy_arrays(each) for name, each in item.items()}
    if isinstance(item, tuple) and hasattr(item, "_fields"):
        return type(item)(*map(_copy_arrays, item))
    return type(item)(map(_copy_arrays, item)) if type(item) in (tuple, list) else item


class _Ahead:
    """State shared by the thread and the consumer: the items drawn ahead, and how iteration ended."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._items: deque[Any] = deque()
        self._changed = threading.Condition()
        self._stopped = False
        self._end: BaseException | None = None

    @property
    def is_empty(self) -> bool:
        return not self._items

    def wait_for_room(self) -> bool:
        """Wait until there is room for an item; return False once the consumer has stopped."""
        with self._changed:
            self._changed.wait_for(lambda: self._stopped or len(self._items) < self._size)
            return not self._stopped

    def put(self, item: Any) -> None:
        with self._changed:
            if not self._stopped:
                self._items.append(item)
                self._changed.notify_all()

    def end(self, reason: BaseException) -> None:
        with self._changed:
            self._end = reason
            self._changed.notify_all()

    def take(self, should_stop: Callable[[], bool]) -> Any:
        with self._changed:
            while not self._changed.wait_for(
                lambda: self._items or self._end is not None or self._stopped, _ASK_SECONDS
            ):
                if should_stop():
                    raise StopIteration
            if self._stopped:
                raise StopIteration
            if self._items:
                item = self._items.popleft()
                self._changed.notify_all()
                return item
            assert self._end is not None
            if isinstance(self._end, StopIteration):
                raise StopIteration
            error, self._end = self._end, StopIteration()
            raise error

    def stop(self) -> None:
        with self._changed:
            self._stopped = True
            self._items.clear()
            self._changed.notify_all()


def _fill(iterator: Iterator[Any], ahead: _Ahead) -> None:
    try:
        try:
            while ahead.wait_for_room():
                ahead.put(next(iterator))
        finally:
            close = getattr(iterator, "close", None)
            if close is not None:
                close()
    except BaseException as error:  # passed on to the consumer; StopIteration is the end
        ahead.end(error)
