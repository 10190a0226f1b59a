"""Lines of JSON between the supervisor and its agents, over a connection authenticated by the job's secret.

The secret itself is never sent. Each end proves that it knows the secret by a keyed hash of both ends' nonces.
Both ends derive the keys that sign every message with its sequence number: no message can be forged, changed,
repeated or dropped.
"""

import hashlib
import hmac
import json
import secrets
import select
import socket
import time
from typing import Any, NamedTuple

from ...system import json_reader

Message = dict[str, Any]

MAX_MESSAGE_BYTES = 4 << 20
"""Maximum size of a message in bytes: a peer that sends more is not one of ours."""

GREETING_SECONDS = 5.0
"""Time for the entire handshake, however the other end divides it."""

_AGENT, _SUPERVISOR = b"panax agent", b"panax supervisor"
_WELCOME, _WRONG = b"\1", b"\0"
_NONCE = _PROOF = hashlib.sha256().digest_size
_SEAL = 2 * hashlib.sha256().digest_size


class HandshakeRefusedError(ConnectionError):
    """The other end does not know the job's secret, or is another program."""


class PeerBusyError(ConnectionError):
    """The other end did not answer in time, or closed the connection before it answered: it may answer later."""


class SigningKeys(NamedTuple):
    """Keys that sign the messages of this end and of the other end."""

    own: bytes
    other: bytes


class Channel:
    """One end of a connection. `send` and `receive` exchange complete messages; no Python object is
    unpickled."""

    def __init__(self, connection: socket.socket, keys: SigningKeys | None = None):
        """Wrap a connected socket.

        Args:
            keys: None for a pair of sockets that never leaves this machine.
        """
        self._connection, self._keys = connection, keys
        self._sent = self._received = 0
        self._waiting = b""
        self._to_send = b""
        self.closed = False
        connection.setblocking(False)
        if self.is_remote:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def fileno(self) -> int:
        return self._connection.fileno()

    @property
    def address(self) -> str:
        """Return this end's address, if it has one."""
        name = self._connection.getsockname()
        return name[0] if isinstance(name, tuple) else "127.0.0.1"

    @property
    def is_remote(self) -> bool:
        """Return True if the other end may be on another machine."""
        return self._connection.family in (socket.AF_INET, socket.AF_INET6)

    @property
    def has_pending(self) -> bool:
        """Return True if data is waiting to be sent."""
        return bool(self._to_send)

    def send(self, **message: Any) -> None:
        """Send a message now, or as soon as the other end accepts it."""
        line = json.dumps(message).encode()
        if self._keys is not None:
            line = _seal(self._keys.own, self._sent, line) + line
            self._sent += 1
        self._to_send += line + b"\n"
        self.flush()

    def flush(self) -> None:
        """Send pending data, as far as the other end accepts it."""
        try:
            while self._to_send and not self.closed:
                self._to_send = self._to_send[self._connection.send(self._to_send) :]
        except (BlockingIOError, InterruptedError):
            pass
        except OSError:
            self.closed = True
        if len(self._to_send) > MAX_MESSAGE_BYTES:
            self.closed = True

    def receive(self) -> list[Message]:
        """Return the received messages; `closed` is set if the other end has gone, or sends invalid data."""
        try:
            while True:
                data = self._connection.recv(1 << 16)
                if not data:
                    self.closed = True
                    break
                self._waiting += data
                if len(self._waiting) > MAX_MESSAGE_BYTES:
                    self.closed = True
                    break
        except (BlockingIOError, InterruptedError):
            pass
        except OSError:
            self.closed = True
        *lines, self._waiting = self._waiting.split(b"\n")
        try:
            messages = [
                json_reader.parse(self._verify(line), max_bytes=MAX_MESSAGE_BYTES, constants=True) for line in lines
            ]
        except ValueError:
            self.closed = True
            return []
        return [each for each in messages if isinstance(each, dict)]

    def _verify(self, line: bytes) -> bytes:
        if self._keys is None:
            return line
        line, seal = line[_SEAL:], line[:_SEAL]
        if not hmac.compare_digest(seal, _seal(self._keys.other, self._received, line)):
            raise ValueError("the message is not from the other end, or not its next one")
        self._received += 1
        return line

    def close(self) -> None:
        self.closed = True
        self._connection.close()


class Handshake:
    """The supervisor's side of the handshake with a new connection; it never blocks."""

    def __init__(self, connection: socket.socket, secret: str):
        self._connection, self._secret = connection, secret
        self._mine, self._read = secrets.token_bytes(_NONCE), b""
        self._until = time.monotonic() + GREETING_SECONDS
        connection.setblocking(False)
        connection.send(self._mine)  # the first bytes of a connection: they fit

    def fileno(self) -> int:
        return self._connection.fileno()

    @property
    def is_expired(self) -> bool:
        """Return True if the time for the handshake is over."""
        return time.monotonic() > self._until

    def advance(self) -> Channel | None:
        """Process received data; return the channel once the other end has proved that it knows the secret.

        Raises:
            HandshakeRefusedError: The other end does not know the secret, or has gone.
            OSError: The connection has failed.
        """
        try:
            data = self._connection.recv(_NONCE + _PROOF - len(self._read))
        except (BlockingIOError, InterruptedError):
            return None
        if not data:
            raise HandshakeRefusedError("the other end closed the connection before it showed the job's secret")
        self._read += data
        if len(self._read) < _NONCE + _PROOF:
            return None
        theirs, proof = self._read[:_NONCE], self._read[_NONCE:]
        if not hmac.compare_digest(proof, _proof(self._secret, _AGENT, self._mine, theirs)):
            self._connection.send(_WRONG)
            raise HandshakeRefusedError("the other end's proof of the job's secret is wrong")
        self._connection.send(_WELCOME + _proof(self._secret, _SUPERVISOR, self._mine, theirs))
        return Channel(self._connection, _keys(self._secret, _SUPERVISOR, self._mine, theirs))

    def close(self) -> None:
        self._connection.close()


def accept_agent(connection: socket.socket, secret: str) -> Channel:
    """Return the supervisor's end of a connection that an agent has opened; waits for the handshake.

    Raises:
        HandshakeRefusedError: The other end does not know the secret.
    """
    greeting = Handshake(connection, secret)
    while not greeting.is_expired:
        if select.select([greeting], [], [], 0.1)[0] and (channel := greeting.advance()) is not None:
            return channel
    raise HandshakeRefusedError(
        f"the peer did not prove that it knows the job's secret within {GREETING_SECONDS:.0f} s"
    )


def connect_to_supervisor(address: str, secret: str, seconds: float) -> Channel:
    """Return the agent's end of a connection to the supervisor at `host:port`.

    Args:
        seconds: Timeout of the connection.

    Raises:
        HandshakeRefusedError: The other end does not know the secret, or reports that this one does not.
        PeerBusyError: The other end did not answer.
        OSError: No process listens at the address.
    """
    host, _, port = address.rpartition(":")
    connection = socket.create_connection((host.strip("[]"), int(port)), timeout=seconds)
    try:
        answers = _DeadlineReader(connection)
        theirs = _exactly(answers, _NONCE)
        mine = secrets.token_bytes(_NONCE)
        connection.sendall(mine + _proof(secret, _AGENT, theirs, mine))
        if _exactly(answers, 1) != _WELCOME:
            raise HandshakeRefusedError("the supervisor rejected this agent's proof of the job's secret")
        if not hmac.compare_digest(_exactly(answers, _PROOF), _proof(secret, _SUPERVISOR, theirs, mine)):
            raise HandshakeRefusedError("the other end's proof of the job's secret is wrong")
    except BaseException:
        connection.close()
        raise
    return Channel(connection, _keys(secret, _AGENT, theirs, mine))


def _proof(secret: str, role: bytes, supervisors: bytes, agents: bytes) -> bytes:
    return hmac.new(secret.encode(), role + supervisors + agents, hashlib.sha256).digest()


def _keys(secret: str, role: bytes, supervisors: bytes, agents: bytes) -> SigningKeys:
    """Derive the two keys of a connection, the same on both ends."""
    agent, supervisor = (_proof(secret, b"key of " + each, supervisors, agents) for each in (_AGENT, _SUPERVISOR))
    return SigningKeys(agent, supervisor) if role == _AGENT else SigningKeys(supervisor, agent)


def _seal(key: bytes, number: int, line: bytes) -> bytes:
    return hmac.new(key, b"%d " % number + line, hashlib.sha256).hexdigest().encode()


def _exactly(connection: "_DeadlineReader", length: int) -> bytes:
    data = b""
    while len(data) < length:
        more = connection.recv(length - len(data))
        if not more:
            raise PeerBusyError("the other end closed the connection before it answered")
        data += more
    return data


class _DeadlineReader:
    """A connection with one deadline for all reads, `GREETING_SECONDS` after its creation."""

    def __init__(self, connection: socket.socket):
        self._connection, self._until = connection, time.monotonic() + GREETING_SECONDS

    def recv(self, length: int) -> bytes:
        left = self._until - time.monotonic()
        try:
            self._connection.settimeout(max(left, 1e-3))
            return self._connection.recv(length)
        except TimeoutError:
            raise PeerBusyError(f"the other end gave no answer within {GREETING_SECONDS:.0f} s") from None
