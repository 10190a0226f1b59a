"""Lines of JSON between the supervisor and its agents, over a connection both ends of which know the job's secret."""

import hashlib
import hmac
import json
import secrets
import socket
from typing import Any

Message = dict[str, Any]

LONGEST = 4 << 20
"""Bytes of one message, at most: whoever sends more is not one of ours."""

GREETING_SECONDS = 5.0
"""For the whole of the handshake."""

_AGENT, _SUPERVISOR = b"panax agent", b"panax supervisor"


class Refused(ConnectionError):
    """The other end does not know the job's secret, or is something else."""


class Channel:
    """One end of a connection. `send` and `received` take and give whole messages; nothing of Python is unpickled."""

    def __init__(self, connection: socket.socket):
        self._connection = connection
        self._waiting = b""
        self._to_send = b""
        self.closed = False
        connection.setblocking(False)
        if self.remote:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def fileno(self) -> int:
        return self._connection.fileno()

    @property
    def address(self) -> str:
        """This end's address, where it has one."""
        name = self._connection.getsockname()
        return name[0] if isinstance(name, tuple) else "127.0.0.1"

    @property
    def remote(self) -> bool:
        """Whether the other end may be on another machine."""
        return self._connection.family in (socket.AF_INET, socket.AF_INET6)

    @property
    def behind(self) -> bool:
        """Whether something waits to be sent."""
        return bool(self._to_send)

    def send(self, **message: Any) -> None:
        """Send a message now, or as soon as the other end takes it."""
        self._to_send += json.dumps(message).encode() + b"\n"
        self.flush()

    def flush(self) -> None:
        """Send what waits, as far as the other end takes it."""
        try:
            while self._to_send and not self.closed:
                self._to_send = self._to_send[self._connection.send(self._to_send) :]
        except (BlockingIOError, InterruptedError):
            pass
        except OSError:
            self.closed = True
        if len(self._to_send) > LONGEST:
            self.closed = True

    def received(self) -> list[Message]:
        """The messages that have come; `closed` is set where the other end has gone, or sends something else."""
        try:
            while True:
                data = self._connection.recv(1 << 16)
                if not data:
                    self.closed = True
                    break
                self._waiting += data
                if len(self._waiting) > LONGEST:
                    self.closed = True
                    break
        except (BlockingIOError, InterruptedError):
            pass
        except OSError:
            self.closed = True
        *lines, self._waiting = self._waiting.split(b"\n")
        try:
            found = [json.loads(line) for line in lines]
        except ValueError:
            self.closed = True
            return []
        return [each for each in found if isinstance(each, dict)]

    def close(self) -> None:
        self.closed = True
        self._connection.close()


def accepted(connection: socket.socket, secret: str) -> Channel:
    """The supervisor's end of a connection that an agent has opened.

    Raises:
        Refused: The other end does not know the secret.
    """
    with _in_time(connection):
        mine = secrets.token_bytes(32)
        connection.sendall(mine)
        theirs, proof = _exactly(connection, 32), _exactly(connection, 32)
        if not hmac.compare_digest(proof, _proof(secret, _AGENT, mine, theirs)):
            raise Refused("the other end does not know the job's secret")
        connection.sendall(_proof(secret, _SUPERVISOR, mine, theirs))
    return Channel(connection)


def connected(address: str, secret: str, seconds: float) -> Channel:
    """The agent's end of a connection to the supervisor at `host:port`.

    Raises:
        Refused: The other end does not know the secret.
        OSError: Nobody listens there.
    """
    host, _, port = address.rpartition(":")
    connection = socket.create_connection((host.strip("[]"), int(port)), timeout=seconds)
    try:
        with _in_time(connection):
            theirs = _exactly(connection, 32)
            mine = secrets.token_bytes(32)
            connection.sendall(mine + _proof(secret, _AGENT, theirs, mine))
            if not hmac.compare_digest(_exactly(connection, 32), _proof(secret, _SUPERVISOR, theirs, mine)):
                raise Refused("the other end does not know the job's secret")
    except BaseException:
        connection.close()
        raise
    return Channel(connection)


def _proof(secret: str, role: bytes, supervisors: bytes, agents: bytes) -> bytes:
    return hmac.new(secret.encode(), role + supervisors + agents, hashlib.sha256).digest()


def _exactly(connection: socket.socket, length: int) -> bytes:
    data = b""
    while len(data) < length:
        more = connection.recv(length - len(data))
        if not more:
            raise Refused("the other end closed the connection before it showed the job's secret")
        data += more
    return data


class _in_time:
    """While it is entered, each wait of the connection ends after a few seconds."""

    def __init__(self, connection: socket.socket):
        self._connection = connection

    def __enter__(self) -> None:
        self._connection.settimeout(GREETING_SECONDS)

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, TimeoutError):
            raise Refused(f"the other end said nothing for {GREETING_SECONDS:.0f} s") from error
