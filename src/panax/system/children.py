"""Child processes that can't block this one, and that end together with everything they have started.

A pipe reveals little about the process at its other end: a process that it has forked holds the pipe open
after its death, and one that hangs never closes it. Every wait here therefore has a deadline and queries the
process itself. A child leads a process group, which is killed as a whole; a second pipe, to which nothing is
written, ends the group when this process dies in any way.
"""

import contextlib
import os
import select
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

LIFELINE = "PANAX_CHILD_LIFELINE"
"""Environment variable with the descriptor of the pipe that closes when the parent ends."""

MAX_OUTPUT_BYTES = 1 << 26
"""Maximum number of bytes that are returned of each output of a command."""

_LOOK_SECONDS = 0.2
_BLOCK = 1 << 20


class PipedProcess:
    """A process with a pipe to its standard input and one from its standard output.

    Attributes:
        pid: Id of the process and of its process group.
    """

    def __init__(self, command: Sequence[str], environment: Mapping[str, str]):
        """Start the process.

        Args:
            environment: All environment variables of the process.

        Raises:
            OSError: The process can't be started.
        """
        # Only this process holds the end that is written to: it closes when this process ends, however it does.
        lifeline, self._held = os.pipe()
        try:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                env={**environment, LIFELINE: str(lifeline)},
                pass_fds=(lifeline,),
                start_new_session=True,
                bufsize=0,
            )
        except BaseException:
            os.close(self._held)
            raise
        finally:
            os.close(lifeline)
        assert self._process.stdin is not None and self._process.stdout is not None
        self.pid = self._process.pid
        self._input, self._output = self._process.stdin.fileno(), self._process.stdout.fileno()
        os.set_blocking(self._input, False)
        os.set_blocking(self._output, False)
        self._read = bytearray()

    @property
    def has_ended(self) -> bool:
        """Return True if the process has ended; its id stays reserved until `end`."""
        return has_ended(self._process)

    def write(self, parts: Iterable[Any], seconds: float) -> None:
        """Write bytes to the process.

        Args:
            parts: Objects with a buffer.
            seconds: Maximum time for which it may accept no bytes.

        Raises:
            EOFError: The process has ended, or closed its input.
            TimeoutError: The process accepts no bytes.
        """
        for part in parts:
            left = memoryview(part).cast("B")
            while len(left):
                self._wait(self._input, select.POLLOUT, seconds)
                try:
                    left = left[os.write(self._input, left[: 1 << 20]) :]
                except BlockingIOError:
                    continue
                except BrokenPipeError:
                    raise EOFError("it has closed its input") from None

    def read_line(self, max_bytes: int, seconds: float) -> bytes:
        """Read a line, with its newline.

        Args:
            seconds: Maximum time for which it may write nothing.

        Raises:
            EOFError: The process has ended, or closed its output.
            TimeoutError: The process writes nothing.
            ValueError: The line is longer than `max_bytes`.
        """
        searched = 0
        while (end := self._read.find(b"\n", searched)) < 0:
            searched = len(self._read)
            if searched > max_bytes:
                raise ValueError(f"its line is longer than {max_bytes:,} bytes")
            self._more(seconds)
        line = bytes(self._read[: end + 1])
        del self._read[: end + 1]
        return line

    def read_exactly(self, size: int, seconds: float) -> bytearray:
        """Read exactly `size` bytes.

        Raises:
            EOFError: The process has ended, or closed its output.
            TimeoutError: The process writes nothing.
        """
        while len(self._read) < size:
            self._more(seconds)
        data = self._read[:size]
        del self._read[:size]
        return data

    def end(self, seconds: float) -> int:
        """Close the pipes, let the process end by itself within `seconds`, then kill its group; return the exit
        code, negative for a signal."""
        self.close()
        last = time.monotonic() + seconds
        while not self.has_ended and time.monotonic() < last:
            time.sleep(0.005)
        self.kill()
        if self._held >= 0:
            os.close(self._held)
            self._held = -1
        return self._process.wait(timeout=60)  # the kernel takes no longer to end a process after SIGKILL

    def close(self) -> None:
        """Close the pipes: a process that reads its input then ends by itself."""
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            with contextlib.suppress(OSError):
                pipe.close()

    def kill(self) -> None:
        """Kill the process and all processes of its group."""
        if self._process.returncode is None:  # until then no other group can have its number
            kill_group(self.pid)

    def _more(self, seconds: float) -> None:
        self._wait(self._output, select.POLLIN, seconds)
        with contextlib.suppress(BlockingIOError):
            data = os.read(self._output, _BLOCK)
            if not data:
                raise EOFError("it has closed its output")
            self._read += data

    def _wait(self, descriptor: int, event: int, seconds: float) -> None:
        poll = select.poll()
        poll.register(descriptor, event)
        waited, before = 0.0, time.monotonic()
        while not poll.poll(min(_LOOK_SECONDS, seconds) * 1000):
            # A process that it forked may hold the pipe, so the process itself is queried. Its last output is
            # read before.
            if self.has_ended and not poll.poll(0):
                raise EOFError("it has ended")
            time_now = time.monotonic()
            # While this process itself was stopped, the silence of the other does not count.
            waited += min(time_now - before, 2 * _LOOK_SECONDS)
            before = time_now
            if waited >= seconds:
                raise TimeoutError(f"nothing for {seconds:g} seconds")


def has_ended(process: "subprocess.Popen[Any]") -> bool:
    """Return True if a child process has ended; its id stays reserved until it is waited for."""
    if process.returncode is not None:
        return True
    if not hasattr(os, "waitid"):  # macOS
        return process.poll() is not None
    try:
        return os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT | os.WNOHANG) is not None
    except ChildProcessError:  # other code has waited for it
        return True


def kill_group(leader: int) -> None:
    """Kill a process that leads a group, and all processes of the group; nothing happens if they have ended.

    The caller has not waited for the leader yet: until then no other group can have its number.
    """
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(leader, signal.SIGKILL)


def stop_group(leader: int) -> None:
    """Suspend a process that leads a group, and all processes of the group, so that none of them starts another; nothing
    happens if they have ended.

    The caller has not waited for the leader yet, as for `kill_group`.
    """
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(leader, signal.SIGSTOP)


def end_process(
    process: "subprocess.Popen[Any]", patience: float, *, grace: float | None = None, group: bool = False
) -> int:
    """Let a child process end by itself, then end it; return its exit code, negative for a signal.

    Args:
        patience: Seconds until the first signal.
        grace: Seconds between SIGTERM and SIGKILL; None for SIGKILL alone.
        group: True to signal all processes of the group that it leads.
    """
    steps = [(None, patience)] if grace is None else [(None, patience), (signal.SIGTERM, grace)]
    for number, seconds in steps:
        if number is not None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, number) if group else process.send_signal(number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            return process.wait(seconds)
    if group:
        kill_group(process.pid)
    else:
        process.kill()
    return process.wait(60)  # the kernel takes no longer to end a process after SIGKILL


class CompletedCommand(NamedTuple):
    """Result of a command that has ended.

    Attributes:
        code: The exit code, negative for a signal.
        output: The first `MAX_OUTPUT_BYTES` of the standard output.
        errors: The first `MAX_OUTPUT_BYTES` of the standard error.
    """

    code: int
    output: str
    errors: str


def run_command(
    command: Sequence[str], seconds: float, *, environment: Mapping[str, str] | None = None, input_text: str = ""
) -> CompletedCommand:
    """Run a command to its end, in a separate process group that is killed when the command ends or its time
    is up.

    `subprocess.run` with a time-out waits without one for the pipes, which a process that the command has
    forked holds open.

    Args:
        seconds: Maximum time.
        environment: All environment variables; None for those of this process.
        input_text: Text for its standard input.

    Raises:
        OSError: The command can't be run.
        TimeoutError: The command took longer; it and the processes that it started were killed.
    """
    with tempfile.TemporaryFile() as source, tempfile.TemporaryFile() as output, tempfile.TemporaryFile() as errors:
        source.write(input_text.encode())
        source.seek(0)
        process = subprocess.Popen(
            command, stdin=source, stdout=output, stderr=errors, env=environment, start_new_session=True
        )
        try:
            code = process.wait(seconds)
        except subprocess.TimeoutExpired:
            raise TimeoutError(f"{command[0]} did not end within {seconds:g} seconds") from None
        finally:
            kill_group(process.pid)
            process.wait(60)
        line = []
        for file in (output, errors):
            file.seek(0)
            line.append(file.read(MAX_OUTPUT_BYTES).decode(errors="replace"))
    return CompletedCommand(code, *line)


def end_with_parent() -> None:
    """Make the kernel kill this child's process group when the parent ends, even while the process hangs.

    Only Linux does: elsewhere a child ends when it next reads its input.
    """
    import fcntl  # Absent on Windows, where `check_platform` ends a run first.

    lifeline = os.environ.pop(LIFELINE, "")
    if not lifeline.isdecimal() or not hasattr(fcntl, "F_SETSIG"):
        return
    descriptor = int(lifeline)
    os.set_inheritable(descriptor, False)
    os.set_blocking(descriptor, False)
    fcntl.fcntl(descriptor, fcntl.F_SETOWN, -os.getpgrp())
    fcntl.fcntl(descriptor, fcntl.F_SETSIG, signal.SIGKILL)
    fcntl.fcntl(descriptor, fcntl.F_SETFL, os.O_NONBLOCK | os.O_ASYNC)
    with contextlib.suppress(BlockingIOError):
        os.read(descriptor, 1)  # at its end: the parent was gone before
        os.killpg(os.getpgrp(), signal.SIGKILL)
