"""One worker as seen by its agent: a process with a log and a pipe of heartbeats, which ends together with its
children."""

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Any

from ...job.heartbeat import DESCRIPTOR
from ...system import children, json_reader
from ..job import panax_arguments
from .standby import StandbyProcess
from .worker import AGENT_VARIABLE, LIFELINE_VARIABLE, STACKS_VARIABLE

TAIL_LINES, TAIL_BYTES = 40, 16_000
"""Limits of the tail of a worker's log that is reported."""

MAX_LINES_BYTES = 32_000
"""Maximum size of the first process's output that is sent at once."""


class WorkerProcess:
    """A running worker process.

    Attributes:
        attempt: The attempt of the job to which the worker belongs.
        first: True for the job's process 0, which writes the output that a job writes once.
        pipe: Pipe of the worker's heartbeats.
        silent: True once the other end of the pipe is closed.
    """

    def __init__(
        self,
        command: Sequence[str],
        environment: dict[str, str],
        folder: Path,
        index: int,
        attempt: int,
        lifeline: int,
        spare: StandbyProcess | None = None,
    ):
        """Start a worker.

        Args:
            command: The worker's command.
            spare: Standby process that becomes the worker, in place of a new process, if it accepts this command.
        """
        self.first, self.attempt, self._index = index == 0, attempt, index
        self._log, self._stacks = log_path(folder, index), stacks_path(folder, index, attempt)
        self.silent, self._partial = False, b""
        self.without_log = self._begin_log()
        # A full or read-only disk of logs does not end training: the worker's output is lost then.
        with open(os.devnull if self.without_log else self._log, "ab", buffering=0) as log:
            self._log_position = log.tell()
            target = Path(os.devnull) if self.without_log else self._log
            if spare is not None and spare.become(panax_arguments(command), environment, target, self._stacks):
                self._process, self.pipe = spare.process, spare.pipe
            else:
                self._process, self.pipe = self._start(command, environment, log, lifeline)
        self._stacks_seen = 0
        self._kills = _out_of_memory_kills()
        self._descriptor: int | None = None
        with contextlib.suppress(OSError, AttributeError):
            # Readable when the process has ended; Linux only.
            self._descriptor = os.pidfd_open(self._process.pid)  # pyright: ignore[reportAttributeAccessIssue]

    def _begin_log(self) -> str:
        """Create the worker's log, and begin a section of it; return an error message, "" on success."""
        self._log_start = 0
        try:
            for path in (self._log, self._stacks):
                path.parent.mkdir(parents=True, exist_ok=True)
            with open(self._log, "ab", buffering=0) as log:
                self._log_start = log.tell()
                log.write(f"== attempt {self.attempt}, {time.strftime('%Y-%m-%d %H:%M:%S')}\n".encode())
        except OSError as error:
            return (
                f"{self._log} can't be written: {error.strerror or error}; the output of process {self._index} is lost"
            )
        return ""

    def _start(
        self, command: Sequence[str], environment: dict[str, str], log: IO[bytes], lifeline: int
    ) -> tuple[subprocess.Popen[bytes], int]:
        """Start a process; return it and the pipe of its heartbeats."""
        reading, writing = os.pipe()
        os.set_blocking(reading, False)
        variables = {
            DESCRIPTOR: str(writing),
            LIFELINE_VARIABLE: str(lifeline),
            AGENT_VARIABLE: str(os.getpid()),
            STACKS_VARIABLE: str(self._stacks),
            "PYTHONUNBUFFERED": "1",
        }
        try:
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env={**os.environ, **environment, **variables},
                pass_fds=(writing, lifeline),
                start_new_session=True,
            )
        except BaseException:
            os.close(reading)
            raise
        finally:
            os.close(writing)
        return process, reading

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def descriptors(self) -> list[int]:
        """Return the descriptors that become readable when the worker sends a heartbeat or ends."""
        return [self.pipe] + ([] if self._descriptor is None else [self._descriptor])

    @property
    def needs_polling(self) -> bool:
        """Return True if the worker's end has to be polled, since the system does not signal it."""
        return self._descriptor is None

    def read_heartbeats(self) -> list[dict[str, Any]]:
        """Return the worker's messages since the last call."""
        with contextlib.suppress(BlockingIOError):
            while data := os.read(self.pipe, 1 << 16):
                self._partial += data
            self.silent = True
        *lines, self._partial = self._partial.split(b"\n")
        messages = []
        for line in lines:
            # A process that the worker started may write there too.
            with contextlib.suppress(ValueError):
                messages.append(json_reader.parse(line, constants=True))
        return [each for each in messages if isinstance(each, dict)]

    def read_new_lines(self, *, all_of_them: bool = False) -> list[str]:
        """Return the complete lines that the worker has written since the last call."""
        try:
            with open(self._log, "rb") as file:
                file.seek(self._log_position)
                data = file.read(MAX_LINES_BYTES)
        except OSError:
            return []  # a cleaning script has removed it
        # A progress bar ends its lines with a carriage return; a line longer than the limit is split.
        end = max(data.rfind(b"\n"), data.rfind(b"\r")) + 1
        new_bytes = data if all_of_them or (not end and len(data) == MAX_LINES_BYTES) else data[:end]
        self._log_position += len(new_bytes)
        # Of a line that was overwritten repeatedly, the text that a terminal would finally show.
        lines = new_bytes.decode(errors="replace").replace("\r\n", "\n").split("\n")
        lines = [next((part for part in reversed(line.split("\r")) if part), "") for line in lines]
        return lines if lines[-1] else lines[:-1]

    def has_ended(self) -> bool:
        """Return True if the process has ended, without reaping it."""
        return children.has_ended(self._process)

    def signal(self, number: signal.Signals) -> None:
        """Signal the worker alone, not the processes that it started."""
        if not self.has_ended():
            os.kill(self.pid, number)

    def request_stacks(self) -> None:
        """Make the worker write the stacks of all its threads."""
        try:
            self._stacks_seen = self._stacks.stat().st_size
        except OSError:
            self._stacks_seen = 0
        self.signal(signal.SIGQUIT)

    def read_stacks(self) -> str:
        """Return the stacks written since the request; empty if the worker can't write them, or has not
        installed the handler."""
        try:
            with open(self._stacks, "rb") as file:
                file.seek(self._stacks_seen)
                return file.read(TAIL_BYTES).decode(errors="replace")
        except OSError:
            return ""

    def kill(self) -> None:
        """Kill the worker and all of its process group with SIGKILL."""
        children.kill_group(self.pid)

    def wait(self) -> None:
        """Wait until the process has ended; it remains to be reaped with `close`."""
        while not self.has_ended():
            time.sleep(0.01)

    def close(self) -> dict[str, Any]:
        """Reap an ended process; return its exit code (negative: a signal), its last lines, and True if it was
        killed because the host was out of memory.

        Its child processes are ended too.
        """
        self.kill()
        code = self._process.wait()
        for descriptor in self.descriptors:
            os.close(descriptor)
        # Remove an empty file of stacks: a job that is restarted often would otherwise leave one per process
        # and start.
        with contextlib.suppress(OSError):
            if not self._stacks.stat().st_size:
                self._stacks.unlink()
        return {
            "code": code,
            "tail": self._tail(),
            "out_of_memory": code == -signal.SIGKILL and _out_of_memory_kills() > self._kills,
        }

    def _tail(self) -> list[str]:
        try:
            with open(self._log, "rb") as file:
                start = max(self._log_start, file.seek(0, os.SEEK_END) - TAIL_BYTES)
                file.seek(start)
                text = file.read(TAIL_BYTES).decode(errors="replace")
        except OSError as error:
            return [f"its log can't be read: {error}"]
        return text.splitlines()[-TAIL_LINES:]


def log_path(folder: Path, index: int) -> Path:
    """Return the path of a process's output, for all attempts."""
    return folder / "logs" / f"process_{index:04d}.log"


def stacks_path(folder: Path, index: int, attempt: int) -> Path:
    """Return the path of the file to which a process dumps its stacks."""
    return folder / "stacks" / f"attempt_{attempt:03d}_process_{index:04d}.txt"


def _out_of_memory_kills() -> int:
    """Return how often the kernel has killed a process because it was out of memory, since boot; 0 if
    unknown."""
    with contextlib.suppress(OSError, ValueError), open("/proc/vmstat", encoding="ascii") as file:
        return next((int(line.split()[1]) for line in file if line.startswith("oom_kill ")), 0)
    return 0
