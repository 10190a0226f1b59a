"""A process that calls functions for `CallPool`: a line of JSON in, a line out.

Started as `python -m panax.rollouts.calls.worker`. It imports the modules of the functions and nothing else
of its parent, unpickles nothing, and does not listen on a port: it ends when its input does. Output, closed
descriptors, forks and threads of a function don't reach the channel.
"""

import contextlib
import ctypes
import importlib
import importlib.util
import inspect
import json
import os
import resource
import signal
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import IO, Any

from ...core.errors import PanaxError
from ...system import json_reader
from ...system.children import end_with_parent
from .error_text import describe_error
from .kinds import KINDS, FunctionKind
from .location import split_location
from .tool_schema import InvalidFunctionError, describe_tool

MAX_REQUEST_BYTES = 1 << 28
"""Maximum size of a request: the arguments of a call."""

OUTPUT_BYTES_PER_SECOND = 16 << 10
"""Amount of the functions' output that is forwarded to stderr each second; more is dropped."""

_IMPORT_LINES = 8
_PR_SET_CHILD_SUBREAPER = 36


def load_function(where: str, kind: FunctionKind) -> Callable[..., Any]:
    """Import a function.

    A file is imported under a name of its own, so the code under `if __name__ == "__main__"` does not run.

    Raises:
        InvalidFunctionError: The function is missing, or does not take the arguments of its kind. Errors of the
            module itself are raised as they are.
    """
    source, name = split_location(where)
    module = _import_file(Path(source)) if source.endswith(".py") else importlib.import_module(source)
    function = getattr(module, name, None)
    if not callable(function):
        raise InvalidFunctionError(f"{source} has no function {name!r} at its top level")
    if inspect.iscoroutinefunction(function):
        raise InvalidFunctionError(
            f"{where} is async; expected a function that returns its result: call asyncio.run inside it"
        )
    kind.check(function, where)
    return function


def _import_file(path: Path) -> Any:
    name = f"panax_function_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None or not path.is_file():
        raise InvalidFunctionError(f"{path} is not a Python file")
    if name in sys.modules and sys.modules[name].__file__ == spec.origin:
        return sys.modules[name]
    # It may import modules of its folder, unless an installed module has the same name.
    folder = str(path.resolve().parent)
    if folder not in sys.path:
        sys.path.append(folder)
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def call_function(kind: FunctionKind, function: Callable[..., Any], arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Call a function; return its value, or the reason of its failure as `error`."""
    try:
        value = kind.call(function, arguments)
    except MemoryError:
        # Nothing is formatted here: leaving this clause frees the memory that the function's frames hold.
        return {"error": "raised MemoryError: it needs more than the process's share of the host's free memory"}
    except BaseException as error:  # KeyboardInterrupt and SystemExit too fail for this call alone
        file = getattr(getattr(function, "__code__", None), "co_filename", "")
        return {"error": f"raised {describe_error(error, file)}"}
    try:
        return {"value": kind.convert(value, arguments)}
    except ValueError as error:
        return {"error": str(error)}


def _describe_import_error(where: str, error: BaseException) -> str:
    """Return a message with the last lines of the traceback."""
    if isinstance(error, InvalidFunctionError):
        return str(error)
    if isinstance(error, PanaxError):
        return f"{where} can't be imported: {error}"
    lines = "".join(traceback.format_exception(error)).rstrip().splitlines()[-_IMPORT_LINES:]
    return f"{where} can't be imported:\n" + "\n".join(f"  {line[:200]}" for line in lines)


def _serve(requests: IO[bytes], replies: IO[bytes]) -> None:
    first = json_reader.parse_as(dict, requests.readline(MAX_REQUEST_BYTES))
    _set_up(first)
    functions, schemas = [], {}
    for where, name, shown in first["functions"]:
        try:
            kind = KINDS[name]
            functions.append((kind, load_function(where, kind)))
            if name == "tool":
                schemas[shown] = describe_tool(functions[-1][1], where)
        except BaseException as error:  # SystemExit too: reported to the parent, which raises it
            _write(replies, {"error": _describe_import_error(where, error)})
            return
    _write(replies, {"schemas": schemas})
    process = os.getpid()
    folder = os.open(".", os.O_RDONLY | os.O_DIRECTORY)
    while line := requests.readline(MAX_REQUEST_BYTES):
        request: Mapping[str, Any] = {}
        try:
            request = json_reader.parse_as(dict, line, constants=True, max_bytes=MAX_REQUEST_BYTES)
            kind, function = functions[request["function"]]
            reply = call_function(kind, function, request["arguments"])
        except json_reader.JsonError as error:
            reply = {"error": f"was not called: of its arguments, {error}"}
        if os.getpid() != process:  # a process that the function forked, and that returned from it
            os._exit(0)
        with contextlib.suppress(OSError):  # the function may have closed the descriptor
            os.fchdir(folder)
        _write(replies, {"call": request.get("call"), **reply})


def _write(replies: IO[bytes], reply: Mapping[str, Any]) -> None:
    replies.write(json.dumps(reply).encode() + b"\n")
    replies.flush()


def _set_up(first: Mapping[str, Any]) -> None:
    """Limit memory, and give the functions' own child processes the environment that the user set."""
    if first["python_path"] is None:
        os.environ.pop("PYTHONPATH", None)
    else:
        os.environ["PYTHONPATH"] = first["python_path"]
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    limit = first["memory_bytes"] if hard == resource.RLIM_INFINITY else min(first["memory_bytes"], hard)
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if sys.platform == "linux":
        # If memory ends nevertheless, the kernel ends this process before the one that trains.
        with contextlib.suppress(OSError):
            Path("/proc/self/oom_score_adj").write_text("1000")
        # Processes that outlive the one that forked them stay descendants of this one, and are found.
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def _limit_output() -> None:
    """Send stdout and stderr through a process that forwards a limited number of bytes per second.

    A thread of this process would not run while a function in C holds the interpreter and prints.
    """
    source, sink = os.pipe()
    child = os.fork()
    if child == 0:
        if os.fork() == 0:  # not a child of this process: a function that waits for its own would wait for it
            _forward(source)
        os._exit(0)
    os.waitpid(child, 0)
    for descriptor in (1, 2):
        os.dup2(sink, descriptor)
    os.close(source)
    os.close(sink)


def _forward(source: int) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    nothing = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1):  # the pipes to the parent: their ends must close with the worker
        os.dup2(nothing, descriptor)
    os.dup2(source, 3)
    os.closerange(4, 256)
    second, left, dropped = 0, 0, 0
    while data := os.read(3, 1 << 16):
        if int(time.monotonic()) != second:
            second, left = int(time.monotonic()), OUTPUT_BYTES_PER_SECOND
            data, dropped = (
                (f"\n[{dropped:,} bytes of functions' output dropped]\n".encode() + data if dropped else data),
                0,
            )
        part, left = data[:left], left - min(left, len(data))
        dropped += len(data) - len(part)
        with contextlib.suppress(OSError):  # stderr is closed
            os.write(2, part)
    os._exit(0)


if __name__ == "__main__":
    end_with_parent()
    own_input, own_output = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    _limit_output()
    _serve(own_input, own_output)
