"""The server's routes: /v1/models, /v1/completions, /v1/chat/completions, /health."""

import asyncio
import contextlib
import dataclasses
import hmac
import json
import re
import time
import uuid
from collections.abc import AsyncIterator, Callable
from typing import Any

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from ...core.errors import DataError, PanaxError, RecipeError
from ...data.text.tokenizer import Tokenizer
from ...system import json_reader
from ..engine import GenerationEngine
from ..requests import Completion, StreamEvent
from .bodies import ServedRequest, read_chat, read_completion
from .engine_thread import EngineThread, Listener
from .responses import CHAT, TEXT, ResponseForm, usage
from .tool_responses import ToolForm

MAX_BODY_BYTES = 16 << 20

Read = Callable[[Any, Tokenizer, str], ServedRequest]


@dataclasses.dataclass(frozen=True)
class ServedModel:
    """A model and its name.

    Attributes:
        tokenizer: The engine's.
    """

    engine: GenerationEngine
    tokenizer: Tokenizer
    name: str


def create_app(model: ServedModel, *, key: str | None = None) -> Starlette:
    """Create the application of a server.

    Args:
        key: Clients must send it as `Authorization: Bearer KEY`; None: no client is asked.
    """
    thread, created = EngineThread(model.engine), int(time.time())

    @contextlib.asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        thread.start()
        try:
            yield
        finally:
            await asyncio.to_thread(thread.stop)

    def route(read: Read, form: ResponseForm) -> Callable[[Request], Any]:
        async def answer(request: Request) -> Response:
            if refused := _refuse(request, key):
                return refused
            try:
                served = read(await _read_body(request), model.tokenizer, model.name)
                return await _answer(request, served, form, model, thread)
            except PanaxError as error:
                return _error(400, str(error))

        return answer

    async def models(request: Request) -> Response:
        entry = {"id": model.name, "object": "model", "created": created, "owned_by": "panax"}
        return _refuse(request, key) or JSONResponse({"object": "list", "data": [entry]})

    async def health(request: Request) -> Response:
        return JSONResponse({"status": "ok"})

    return Starlette(
        routes=[
            Route("/v1/completions", route(read_completion, TEXT), methods=["POST"]),
            Route("/v1/chat/completions", route(read_chat, CHAT), methods=["POST"]),
            Route("/v1/models", models),
            Route("/health", health),
        ],
        lifespan=lifespan,
    )


LOOPBACK_HOSTS = ("127.0.0.1", "localhost", "[::1]")
"""Names by which a server without a key may be called."""


def _refuse(request: Request, key: str | None) -> Response | None:
    """Refuse a client without the key; without one, a web page that is open in a browser on this machine."""
    if key is None:
        # The origin of a page without a host, such as a file, is "null": it is none of these hosts.
        origins = [origin.partition("://")[2] for origin in request.headers.getlist("origin")]
        hosts = [request.headers.get("host", ""), *origins]
        if all(re.sub(r":[0-9]+$", "", host) in LOOPBACK_HOSTS for host in hosts):
            return None
        return _error(403, "pages of other hosts are refused; start the server with a key to reach it by another name")
    client_key = request.headers.get("authorization", "").removeprefix("Bearer ")
    if hmac.compare_digest(client_key.encode(), key.encode()):
        return None
    return _error(401, "the key is missing or wrong; send the server's key as `Authorization: Bearer KEY`")


def _error(status: int, message: str) -> Response:
    kind = "invalid_request_error" if status < 500 else "server_error"
    return JSONResponse({"error": {"message": message, "type": kind, "param": None, "code": None}}, status)


async def _read_body(request: Request) -> Any:
    body = b""
    async for part in request.stream():
        body += part
        if len(body) > MAX_BODY_BYTES:
            raise RecipeError(f"the body is longer than {MAX_BODY_BYTES:,} bytes; send fewer prompts at once")
    try:
        return json_reader.parse(body)
    except json_reader.JsonError as error:
        raise RecipeError(f"the body can't be read: {error}") from error


async def _answer(
    request: Request, served: ServedRequest, form: ResponseForm, model: ServedModel, thread: EngineThread
) -> Response:
    for each in served.requests:
        if each.sampling.constraint is None:
            model.engine.check(each)
        else:
            # It is compiled, which may take a second.
            await asyncio.to_thread(model.engine.check, each)
    form = form if served.tools is None else ToolForm(served.tools)
    submitted = [await thread.submit(each) for each in served.requests]
    answer = _Answers(served, form, model, thread, submitted)
    if served.stream:
        return StreamingResponse(answer.stream(), media_type="text/event-stream")
    return await answer.whole(request)


class _Answers:
    """The answers to one HTTP request: `n` to each of its prompts."""

    def __init__(
        self,
        served: ServedRequest,
        form: ResponseForm,
        model: ServedModel,
        thread: EngineThread,
        submitted: list[tuple[int, Listener]],
    ):
        self._served, self._form, self._model, self._thread, self._submitted = served, form, model, thread, submitted
        self._frame = {
            "id": f"{form.prefix}-{uuid.uuid4().hex}",
            "created": int(time.time()),
            "model": model.name,
        }

    async def whole(self, request: Request) -> Response:
        """Return all answers, or nothing to a client that has left."""
        gone = asyncio.create_task(_wait_until_gone(request))
        work = asyncio.create_task(self._completions())
        try:
            await asyncio.wait([gone, work], return_when=asyncio.FIRST_COMPLETED)
            if not work.done():
                return Response(status_code=499)
            completions = work.result()
        except RuntimeError as error:
            return _error(500, str(error))
        finally:
            gone.cancel()
            work.cancel()
            self._drop()
        choices = [
            self._form.choice(index, completion, self._served, self._model.tokenizer, self._prompt(completion))
            for index, completion in enumerate(completions)
        ]
        body = {**self._frame, "object": self._form.whole, "choices": choices}
        return JSONResponse(body | {"usage": usage(self._served, completions)})

    async def stream(self) -> AsyncIterator[str]:
        """Yield server-sent events with each new text."""
        completions: list[Completion] = []
        try:
            for index in range(len(self._served.requests) * self._samples):
                for delta in self._form.first(index, self._served, self._model.tokenizer):
                    yield self._event([delta])
            async for index, event in self._events():
                if delta := self._form.delta(index, event, self._served, self._model.tokenizer):
                    yield self._event([delta])
                if event.completion is not None:
                    completions.append(event.completion)
            if self._served.includes_usage:
                yield self._event([], {"usage": usage(self._served, completions)})
            yield "data: [DONE]\n\n"
        except (RuntimeError, DataError) as error:
            kind = "server_error" if isinstance(error, RuntimeError) else "invalid_request_error"
            yield f"data: {json.dumps({'error': {'message': str(error), 'type': kind}})}\n\n"
        finally:
            # A client that leaves ends the iterator.
            self._drop()

    @property
    def _samples(self) -> int:
        return self._served.requests[0].sampling.n

    def _prompt(self, completion: Completion) -> tuple[int, ...]:
        place = [number for number, _ in self._submitted].index(completion.number)
        return self._served.requests[place].prompt

    def _event(self, choices: list[dict[str, Any]], extra: dict[str, Any] | None = None) -> str:
        body = {**self._frame, "object": self._form.part, "choices": choices} | (extra or {})
        return f"data: {json.dumps(body, ensure_ascii=False)}\n\n"

    async def _completions(self) -> list[Completion]:
        by_index = {index: event.completion async for index, event in self._events() if event.completion is not None}
        return [by_index[index] for index in sorted(by_index)]

    async def _events(self) -> AsyncIterator[tuple[int, StreamEvent]]:
        """Yield all events with the index of their choice.

        Raises:
            RuntimeError: The engine failed.
            DataError: An answer can't meet its constraint.
        """
        merged: asyncio.Queue[tuple[int, StreamEvent | BaseException]] = asyncio.Queue()

        async def forward(place: int, listener: Listener) -> None:
            left = self._samples
            while left:
                item = await listener.get()
                await merged.put((place, item))
                if isinstance(item, BaseException):
                    return
                left -= item.completion is not None

        tasks = [asyncio.create_task(forward(place, listener)) for place, (_, listener) in enumerate(self._submitted)]
        try:
            left = len(tasks) * self._samples
            while left:
                place, item = await merged.get()
                if isinstance(item, BaseException):
                    raise RuntimeError(f"the engine failed: {item}") from item
                left -= item.completion is not None
                if item.completion is not None and item.completion.finish == "error":
                    raise DataError(
                        f"the answer ended after {len(item.completion.tokens)} tokens: {item.completion.error}"
                    )
                yield place * self._samples + item.sample, item
        finally:
            for task in tasks:
                task.cancel()

    def _drop(self) -> None:
        for number, _ in self._submitted:
            self._thread.cancel(number)


async def _wait_until_gone(request: Request) -> None:
    while not await request.is_disconnected():
        await asyncio.sleep(0.2)
