"""`CallProcess`: a process that calls users' functions, and is started again after a call that it did not survive."""

import contextlib
import json
import os
import secrets
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil

from ...core.errors import RecipeError, TrainingError
from ...system import json_reader
from ...system.children import PipedProcess, stop_group
from ...system.host_memory import free_bytes
from .location import split_location

MAX_DESCENDANTS = 256
"""Maximum number of processes that run at once under one that calls functions."""

WORKER_VARIABLE = "PANAX_REWARD_PROCESS"
"""Environment variable that is set in processes that call functions."""

_MAX_REPLY_BYTES = 1 << 20
_SECONDS_TO_BEGIN, _SECONDS_TO_END, _SECONDS_TO_ACCEPT = 120.0, 2.0, 60.0
_LOOK_SECONDS = 0.1
_ROUNDS_OF_KILLING = 20


class CallError(Exception):
    """A call without a result; the message is the reason, as a predicate of the function."""


class CancelledError(Exception):
    """A call that was given up because the caller stopped waiting; its process was killed."""


class CallProcess:
    """A process with all functions that a pool calls.

    It leads a process group and a session of its own, so Ctrl-C in a terminal does not reach it.

    Attributes:
        schemas: Descriptions of the tools among the functions, by location; known once they are imported.
    """

    def __init__(self, set_up: Mapping[str, Any]):
        """Prepare the process; `launch` starts it.

        Args:
            set_up: The first request: the functions' locations and the limits.
        """
        self._set_up = json.dumps(set_up).encode() + b"\n"
        self._process: PipedProcess | None = None
        self._is_ready = False
        self.schemas: Mapping[str, Any] = {}
        self._number = secrets.randbits(40)  # a function that writes to all descriptors does not know it

    def launch(self) -> None:
        """Start the process, without waiting for its imports.

        Raises:
            TrainingError: It can't be started.
        """
        command = [sys.executable, "-P", "-u", "-X", "faulthandler", "-m", "panax.rollouts.calls.worker"]
        try:
            self._process = PipedProcess(command, _environment())
            self._process.write([self._set_up], _SECONDS_TO_ACCEPT)
        except (OSError, EOFError) as error:
            raise TrainingError(
                f"a process for functions of rewards and environments can't be started: {error}"
            ) from error

    def confirm(self) -> None:
        """Wait until the functions are imported.

        Raises:
            TrainingError: A function can't be imported; the message has the last lines of the traceback.
        """
        assert self._process is not None
        try:
            reply = json_reader.parse_as(dict, self._process.read_line(1 << 20, _SECONDS_TO_BEGIN))
            problem = reply.get("error")
            self.schemas = reply.get("schemas", {})
        except TimeoutError:
            problem = f"their modules were not imported within {_SECONDS_TO_BEGIN:g} seconds; move slow work into the functions"
        except EOFError:
            problem = f"it ended {_describe_exit(self.kill(_SECONDS_TO_END))} while it imported their modules"
        except ValueError as error:
            problem = f"it sent an invalid reply: {error}"
        if problem is not None:
            self.kill()
            raise TrainingError(f"a process for functions of rewards and environments can't be started: {problem}")
        self._is_ready = True

    def call(self, function: int, arguments: str, seconds: float, is_cancelled: Callable[[], bool]) -> Any:
        """Call a function; return its value, of JSON.

        Args:
            function: The function's number.
            arguments: Its arguments by name: a JSON object.
            seconds: Time limit.
            is_cancelled: Called several times a second; True to give the call up.

        Raises:
            CallError: The function failed. If its process did not survive that, the next call starts another.
            CancelledError: The caller cancelled it.
            TrainingError: No process can be started.
        """
        if self._process is None:
            self.launch()
        if not self._is_ready:
            self.confirm()
        process = self._process
        assert process is not None
        self._number += 1
        try:
            request = f'{{"call": {self._number}, "function": {function}, "arguments": {arguments}}}\n'
            process.write([request.encode()], _SECONDS_TO_ACCEPT)
            reply = json_reader.parse_as(dict, self._read_reply(process, seconds, is_cancelled))
        except EOFError:
            time.sleep(_LOOK_SECONDS / 2)  # its last output is still being forwarded
            raise CallError(
                f"ended its process {_describe_exit(self.kill(_SECONDS_TO_END))}; another takes its place"
            ) from None
        except ValueError:
            self.kill()
            raise CallError("wrote into the pipes of its process") from None
        except BaseException:
            self.kill()
            raise
        # A request that can't be parsed has no number.
        if reply.get("call") != self._number and not (reply.get("call", 0) is None and "error" in reply):
            self.kill()
            raise CallError("wrote into the pipes of its process")
        if "error" in reply:
            raise CallError(str(reply["error"]))
        return reply.get("value")

    def kill(self, patience: float = 0.0) -> int:
        """Kill the process with everything that its functions started, in other sessions too; return its exit
        code, negative for a signal, or 0 if there was none.

        Args:
            patience: Seconds for which it may end by itself.
        """
        if self._process is None:
            return 0
        process, self._process, self._is_ready = self._process, None, False
        last = time.monotonic() + patience
        while not process.has_ended and time.monotonic() < last:
            time.sleep(0.005)
        # Nothing of the group starts other processes from now on.
        stop_group(process.pid)
        _kill_outside(process.pid)
        return process.end(0.0)

    def close(self) -> None:
        """Close the pipes of an idle process, so that it ends by itself; `kill` waits for it."""
        if self._process is not None:
            _kill_outside(self._process.pid)
            self._process.close()

    def _read_reply(self, process: PipedProcess, seconds: float, is_cancelled: Callable[[], bool]) -> bytes:
        waited, before, num_threads = 0.0, time.monotonic(), _count_threads()
        while True:
            try:
                return process.read_line(_MAX_REPLY_BYTES, max(0.001, min(_LOOK_SECONDS, seconds - waited)))
            except TimeoutError:
                pass
            # While this process itself was stopped, time does not count.
            now = time.monotonic()
            waited, before = waited + min(now - before, 1.0), now
            if is_cancelled():
                raise CancelledError
            if waited >= seconds:
                raise CallError(
                    f"gave no result within {seconds:g} seconds; its process was killed, and another takes its place"
                )
            # Looking at all processes of the host is slow, so only if their number has grown.
            if (count := _count_threads()) > num_threads + MAX_DESCENDANTS:
                num_threads = count
                if len(_descendants(process.pid)) > MAX_DESCENDANTS:
                    raise CallError(f"started more than {MAX_DESCENDANTS} processes; all were killed")


def refuse_in_worker() -> None:
    """Check that this process is not itself one that calls functions.

    Raises:
        RecipeError: It is one: a file with functions starts a run when it is imported.
    """
    if os.environ.get(WORKER_VARIABLE):
        raise RecipeError(
            "a file with functions of rewards or environments starts a run when it is imported; move the code that runs it "
            'under if __name__ == "__main__":'
        )


def read_schemas(locations: Sequence[str]) -> Mapping[str, Any]:
    """Import tools in another process, and return their descriptions in OpenAI's form, by location.

    Raises:
        RecipeError: A function can't be imported, or its parameters can't be described.
    """
    refuse_in_worker()
    process = CallProcess(make_set_up([(where, "tool") for where in locations], free_bytes()))
    try:
        process.launch()
        process.confirm()
        return process.schemas
    except TrainingError as error:
        raise RecipeError(str(error)) from error
    finally:
        process.kill()


def make_set_up(functions: Sequence[tuple[str, str]], memory_bytes: int) -> Mapping[str, Any]:
    """Return the first request to a process.

    Args:
        functions: Location and kind of each.
        memory_bytes: Maximum size of the process's data.
    """
    return {
        "functions": [[_absolute(where), kind, where] for where, kind in functions],
        "memory_bytes": memory_bytes,
        "python_path": os.environ.get("PYTHONPATH"),
    }


def _absolute(where: str) -> str:
    source, name = split_location(where)
    return f"{Path(source).absolute()}:{name}" if source.endswith(".py") else where


def _environment() -> dict[str, str]:
    """Return the process's environment: it finds modules where this process does, uses one thread, and takes no
    accelerator."""
    threads = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
    folders = [*(folder or os.getcwd() for folder in sys.path), str(Path(__file__).parents[3])]
    return {
        **os.environ,
        **threads,
        "JAX_PLATFORMS": "cpu",
        # Sets have the same order in each process, and after a restart.
        "PYTHONHASHSEED": "0",
        "PYTHONPATH": os.pathsep.join(folders),
        WORKER_VARIABLE: "1",
    }


def _count_threads() -> int:
    """Return the number of threads on this host; 0 if the system does not count them."""
    try:
        return int(Path("/proc/loadavg").read_text().split()[3].partition("/")[2])
    except (OSError, IndexError, ValueError):
        return 0


def _descendants(pid: int) -> list[psutil.Process]:
    try:
        return psutil.Process(pid).children(recursive=True)
    except psutil.Error:
        return []


def _kill_outside(group: int) -> None:
    """Kill the descendants of a process that are not in its group, and those that they start meanwhile."""
    for _ in range(_ROUNDS_OF_KILLING):
        outside = [each for each in _descendants(group) if _is_outside(each, group)]
        if not outside:
            return
        for each in outside:
            with contextlib.suppress(psutil.Error):  # it has ended
                each.kill()


def _is_outside(process: psutil.Process, group: int) -> bool:
    """Return True for a live process of another group."""
    try:
        return os.getpgid(process.pid) != group and process.status() != psutil.STATUS_ZOMBIE
    except (psutil.Error, ProcessLookupError):
        return False


def _describe_exit(code: int) -> str:
    if code >= 0:
        return f"with exit code {code}"
    try:
        name = signal.Signals(-code).name
    except ValueError:
        name = f"signal {-code}"
    return f"by {name}"
