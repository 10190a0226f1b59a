"""Client programs of engines: run for an answer, or monitored while agents run under them; and the address
that nodes can reach."""

import contextlib
import os
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from typing import IO

from ...core.errors import LaunchError
from ...system import children
from ...system.signals import signal_name

ANSWER_SECONDS = 20.0
"""Time for a client to answer: a wrong address is reported within half a minute."""

END_SECONDS = 10.0
"""Time for a followed client to end with its agents, and again after each signal."""

TAIL_LINES, TAIL_BYTES = 12, 4000
"""Limits of a client's output that is repeated in messages."""


def require(program: str, advice: str, environment: Mapping[str, str]) -> str:
    """Return the path of a program.

    Raises:
        LaunchError: The program is not installed.
    """
    path = shutil.which(program, path=environment.get("PATH"))
    if path is None:
        raise LaunchError(f"{program} is not on PATH; {advice}")
    return path


def run_client(command: Sequence[str], environment: Mapping[str, str], *, input_text: str | None = None) -> str:
    """Run a client and return its output.

    Args:
        input_text: Text for its standard input.

    Raises:
        LaunchError: The client failed, or did not answer in time.
    """
    command_text = " ".join(command[:3])
    try:
        result = children.run_command(command, ANSWER_SECONDS, environment=environment, input_text=input_text or "")
    except TimeoutError as error:
        raise LaunchError(f"`{command_text}` gave no answer in {ANSWER_SECONDS:.0f} s; is its server up?") from error
    except OSError as error:
        raise LaunchError(f"`{command_text}` can't be run: {error}") from error
    if result.code:
        raise LaunchError(
            f"`{command_text}` failed: {last_lines(result.errors or result.output, 4) or f'exit code {result.code}'}"
        )
    return result.output


def last_lines(text: str, count: int = TAIL_LINES) -> str:
    """Return the last lines with content, at most `count`."""
    lines = [line.rstrip() for line in text[-TAIL_BYTES:].splitlines() if line.strip(" -=*\t")]
    return "\n".join(lines[-count:])


def read_tail(file: IO[bytes]) -> str:
    """Return the last lines of a file that a process still writes; empty if it is closed.

    The file is read with `pread`, which does not move the file position: the process that writes shares it.
    """
    if file.closed:
        return ""
    start = max(0, os.fstat(file.fileno()).st_size - TAIL_BYTES)
    return last_lines(os.pread(file.fileno(), TAIL_BYTES, start).decode(errors="replace"))


class ClientProcess:
    """A client that runs as long as its agents, such as mpirun or srun. The terminal's Ctrl-C signals only the
    supervisor, not the client."""

    def __init__(self, command: Sequence[str], environment: Mapping[str, str]):
        self._name = command[0].rsplit("/", 1)[-1]
        self._output: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115
        try:
            self._process = subprocess.Popen(
                command,
                env=dict(environment),
                stdin=subprocess.DEVNULL,
                stdout=self._output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        except OSError as error:
            self._output.close()
            raise LaunchError(f"{command[0]} can't be run: {error}") from error

    @property
    def pid(self) -> int:
        return self._process.pid

    def failure(self) -> str:
        """Return why the client has failed; empty while it runs, and if all agents ended as requested."""
        code = self._process.poll()
        if not code:
            return ""
        how = f"by {signal_name(-code)}" if code < 0 else f"with exit code {code}"
        return f"{self._name} ended {how}: {self.log_tail() or 'no output'}"

    def log_tail(self) -> str:
        """Return the last lines of the client and of the agents that it forwards."""
        return read_tail(self._output)

    def close(self, seconds: float = END_SECONDS) -> None:
        """Wait for the client to end, as it does after its agents; otherwise end it.

        Args:
            seconds: Time to wait before the first signal.
        """
        children.end_process(self._process, seconds, grace=END_SECONDS)
        self._output.close()


def local_address(peer: str = "") -> str:
    """Return the address of this machine that a peer can reach; by default that of its default route. Nothing
    is sent.

    >>> local_address("127.0.0.1")
    '127.0.0.1'
    """
    # TEST-NET-3 stands for any other machine.
    for host in (peer, "203.0.113.1"):
        if not host:
            continue
        with contextlib.suppress(OSError):
            addresses = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)
            family, kind, protocol, _, target = addresses[0]
            with socket.socket(family, kind, protocol) as opened:
                opened.connect(target)
                return str(opened.getsockname()[0])
    with contextlib.suppress(OSError):
        return socket.gethostbyname(socket.gethostname())
    return "127.0.0.1"


def is_local_host(host: str) -> bool:
    """Return True if a host's name or address is this machine's.

    >>> is_local_host("localhost"), is_local_host("203.0.113.1")
    (True, False)
    """
    with contextlib.suppress(OSError):
        for family, kind, protocol, _, where in socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM):
            with contextlib.suppress(OSError), socket.socket(family, kind, protocol) as opened:
                opened.bind((where[0], 0))
                return True
    return False


def wait_for_port(host: str, port: int, seconds: float) -> bool:
    """Wait until a server listens at an address; return False after `seconds`."""
    deadline = time.monotonic() + seconds
    while True:
        with contextlib.suppress(OSError), socket.create_connection((host, port), timeout=5.0):
            return True
        if time.monotonic() > deadline:
            return False
        time.sleep(0.5)
