"""The thread that runs an engine, and the queues by which the server's tasks talk to it."""

import asyncio
import queue
import threading
from collections.abc import Callable
from typing import NamedTuple

from ..engine import GenerationEngine
from ..requests import GenerationRequest, StreamEvent

_LOOK_SECONDS = 0.5
"""Time after which an idle thread looks whether it is to end."""

Listener = asyncio.Queue[StreamEvent | BaseException]


class _Submission(NamedTuple):
    request: GenerationRequest
    listener: Listener
    loop: asyncio.AbstractEventLoop
    accepted: "asyncio.Future[int]"


class EngineThread:
    """Runs an engine for tasks of an event loop.

    All calls of the engine are in this one thread, so that the server answers while a program runs.
    """

    def __init__(self, engine: GenerationEngine):
        self._engine = engine
        self._orders: queue.SimpleQueue[_Submission | Callable[[], None]] = queue.SimpleQueue()
        self._listeners: dict[int, _Submission] = {}
        self._left: dict[int, int] = {}
        self._ends = threading.Event()
        self._thread = threading.Thread(target=self._run, name="panax-engine", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """End the thread after the step that it runs; requests in progress are dropped."""
        self._ends.set()
        self._orders.put(lambda: None)
        self._thread.join()

    async def submit(self, request: GenerationRequest) -> tuple[int, Listener]:
        """Add a request; return its number, and a queue of its events. An exception in the queue is its last item."""
        loop = asyncio.get_running_loop()
        submission = _Submission(request, asyncio.Queue(), loop, loop.create_future())
        self._orders.put(submission)
        return await submission.accepted, submission.listener

    def cancel(self, number: int) -> None:
        """Drop a request, such as that of a client that has left."""

        def drop() -> None:
            self._engine.cancel(number)
            self._listeners.pop(number, None)
            self._left.pop(number, None)

        self._orders.put(drop)

    def _run(self) -> None:
        while not self._ends.is_set():
            self._take_orders(wait=self._engine.is_idle)
            try:
                events = self._engine.step()
            except Exception as error:
                # The engine has dropped all requests; the next ones find it as new.
                for submission in self._listeners.values():
                    _send(submission, error)
                self._listeners.clear()
                self._left.clear()
                continue
            for event in events:
                if submission := self._listeners.get(event.number):
                    _send(submission, event)
                    self._left[event.number] -= event.completion is not None
                    if not self._left[event.number]:
                        del self._listeners[event.number], self._left[event.number]
        for submission in self._listeners.values():
            _send(submission, RuntimeError("the server is shutting down"))

    def _take_orders(self, *, wait: bool) -> None:
        try:
            while True:
                order = self._orders.get(block=wait, timeout=_LOOK_SECONDS if wait else None)
                wait = False
                if isinstance(order, _Submission):
                    self._accept(order)
                else:
                    order()
        except queue.Empty:
            return

    def _accept(self, submission: _Submission) -> None:
        try:
            number = self._engine.submit(submission.request)
        except Exception as error:
            _call(submission, submission.accepted.set_exception, error)
            return
        self._listeners[number], self._left[number] = submission, submission.request.sampling.n
        _call(submission, submission.accepted.set_result, number)


def _send(submission: _Submission, item: StreamEvent | BaseException) -> None:
    _call(submission, submission.listener.put_nowait, item)


def _call(submission: _Submission, function: Callable[..., object], value: object) -> None:
    """Call a function in the event loop of a submission, unless that is closed or its task is cancelled."""

    def call() -> None:
        if not submission.accepted.cancelled():
            function(value)

    if not submission.loop.is_closed():
        submission.loop.call_soon_threadsafe(call)
