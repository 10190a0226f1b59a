"""Rendezvous before JAX joins the processes of a job: process 0 waits until all have arrived, and reports the
result to all of them.

JAX ends a process by SIGABRT if another one does not arrive. Here each process gets one message that names the
missing ones. Each line on a connection is a JSON object; process 0 sends the first:

    process 0:  {"panax": 1, "nonce": N}
    another:    {"index": 2, "processes": 4, "facts": {...}, "nonce": M, "proof": ...}
    process 0:  {"error": "", "proof": ...}      when all have arrived, or time is up

A proof is a keyed hash of both nonces with the job's secret, so that neither side accepts a stranger as a
process of its job.
"""

import contextlib
import dataclasses
import hashlib
import hmac
import json
import secrets
import selectors
import socket
import time
from collections.abc import Iterator, Mapping
from typing import Any

from ..core.errors import JoinError, RecipeError
from ..system import json_reader
from .membership import Membership, split_address

_PROTOCOL = 1
_LONGEST_LINE = 16384
_PAUSE_SECONDS = 0.05
_LINGER_SECONDS = 2.0
_GRACE_SECONDS = 5.0  # process 0 may take this much longer: its wait may have begun later
_STRANGER_SECONDS = 5.0
"""Time for a connection to prove that it knows the job's secret, whatever else it sends."""

_CLOSE_SECONDS = 3.0
"""Time in which the other processes, all of them together, close their connections after the result."""


@dataclasses.dataclass(frozen=True)
class RendezvousInfo:
    """Information that a process has before the rendezvous.

    Attributes:
        place: Membership of this process.
        facts: Values that must be the same in all processes, by name, such as versions.
        seconds: Time to wait for the other processes.
        secret: Secret of the job; empty if there is none.
    """

    place: Membership
    facts: Mapping[str, str]
    seconds: float
    secret: bytes = b""

    def proof(self, *parts: str) -> str:
        return hmac.new(self.secret, "\n".join(parts).encode(), hashlib.sha256).hexdigest()


def rendezvous(roll: RendezvousInfo, bind: str) -> None:
    """Wait until all processes of the job have arrived.

    Args:
        bind: "host:port" at which process 0 listens; it is free again afterwards.

    Raises:
        RecipeError: Process 0 can't listen at `bind`, or the processes differ in their number, versions or
            secret.
        JoinError: Not all processes arrived in time.
    """
    if roll.place.index == 0:
        _Coordinator(roll, bind).wait()
    else:
        _answer(roll)


@dataclasses.dataclass
class _Peer:
    """A connection to process 0."""

    connection: socket.socket
    host: str
    nonce: str
    received: bytes = b""
    theirs: str = ""
    index: int | None = None
    introduced: bool = False
    since: float = dataclasses.field(default_factory=time.monotonic)


class _Coordinator:
    """Process 0's side of the rendezvous."""

    def __init__(self, roll: RendezvousInfo, bind: str):
        self.roll, self.bind = roll, bind
        self.peers: dict[int, _Peer] = {}
        self.refused: list[str] = []
        self.strays = 0
        """Number of processes of this job that send contradictory facts."""

    def wait(self) -> None:
        deadline, others = time.monotonic() + self.roll.seconds, self.roll.place.processes - 1
        error = ""
        with selectors.DefaultSelector() as selector:
            listener = self._listen()
            selector.register(listener, selectors.EVENT_READ)
            try:
                while len(self.peers) + self.strays < others:
                    remaining_seconds = deadline - time.monotonic()
                    if remaining_seconds <= 0:
                        error = error or self._missing()
                        break
                    for peer in [key.data for key in selector.get_map().values() if key.data is not None]:
                        if (
                            peer.index is None
                            and not peer.introduced
                            and time.monotonic() - peer.since > _STRANGER_SECONDS
                        ):
                            self._drop(peer, selector)
                    for key, _ in selector.select(min(remaining_seconds, 0.5)):
                        if key.fileobj is listener:
                            self._greet(listener, selector)
                        elif message := self._read_from(key.data, selector):
                            # Those that come a little later should hear it too.
                            error, deadline = error or message, min(deadline, time.monotonic() + _LINGER_SECONDS)
                if not error:
                    error = "" if len(self.peers) == others else self._missing()
            except BaseException as failure:
                error = f"process 0 has ended: {type(failure).__name__}"
                raise
            finally:
                # Closed before the others are told: what answers at this port from now on is JAX.
                listener.close()
                self._send_result([key.data for key in selector.get_map().values() if key.data is not None], error)
        if error:
            raise JoinError(error)

    def _listen(self) -> socket.socket:
        host, port = split_address(self.bind, "the address to listen at")
        family = socket.AF_INET6 if host.startswith("[") else socket.AF_INET
        try:
            listener = socket.create_server((host.strip("[]"), port), family=family, backlog=1024)
        except OSError as error:
            raise RecipeError(
                f"process 0 can't listen at {self.bind} ({error.strerror or error}); choose a port that is free on its host, "
                f"or set PANAX_BIND to an address of that host"
            ) from error
        listener.setblocking(False)
        return listener

    def _greet(self, listener: socket.socket, selector: selectors.BaseSelector) -> None:
        try:
            connection, address = listener.accept()
        except OSError:  # gone again; or no file can be opened, which may pass
            time.sleep(0.01)
            return
        connection.settimeout(_GRACE_SECONDS)
        peer = _Peer(connection, str(address[0]), secrets.token_hex(16))
        selector.register(connection, selectors.EVENT_READ, peer)
        if not _send(connection, {"panax": _PROTOCOL, "nonce": peer.nonce}):
            self._drop(peer, selector)

    def _read_from(self, peer: _Peer, selector: selectors.BaseSelector) -> str:
        """Read from a connection; return an error that ends the wait, "" if there is none."""
        try:
            data = peer.connection.recv(4096)
        except OSError:
            data = b""
        peer.received += data
        if not data or len(peer.received) > _LONGEST_LINE:
            self._drop(peer, selector)
            return ""
        line, ended, _ = peer.received.partition(b"\n")
        if not ended or peer.index is not None:
            return ""
        message = _parse_line(line)
        if not (isinstance(message.get("index"), int) and isinstance(message.get("nonce"), str)):
            self._drop(peer, selector)
            return ""
        peer.theirs, peer.introduced = message["nonce"], True
        expected = self.roll.proof("worker", peer.nonce, peer.theirs, str(message["index"]))
        if not hmac.compare_digest(expected.encode(), str(message.get("proof")).encode()):
            self.refused.append(peer.host)
            self._drop(peer, selector)
            return ""
        error = self._disagreement(message, peer)
        if error:
            self.strays += 1
        else:
            peer.index = message["index"]
            self.peers[message["index"]] = peer
        return error

    def _disagreement(self, message: Mapping[str, Any], peer: _Peer) -> str:
        index, place = message["index"], self.roll.place
        if message.get("processes") != place.processes:
            return (
                f"process {index} at {peer.host} was started with {message.get('processes')} processes, process 0 with "
                f"{place.processes}; start all of them with the same number"
            )
        if not 0 < index < place.processes or index in self.peers:
            return f"two processes were started as process {index}; number them from 0 to {place.processes - 1}"
        theirs = message.get("facts")
        for name, mine in self.roll.facts.items():
            other = theirs.get(name) if isinstance(theirs, dict) else None
            if other != mine:
                return (
                    f"process {index} at {peer.host} has {name} {other or 'unknown'}, process 0 has {mine}; install "
                    f"the same versions on all hosts"
                )
        return ""

    def _drop(self, peer: _Peer, selector: selectors.BaseSelector) -> None:
        selector.unregister(peer.connection)
        peer.connection.close()
        if peer.index is not None:
            del self.peers[peer.index]

    def _missing(self) -> str:
        place = self.roll.place
        absent = [str(index) for index in range(1, place.processes) if index not in self.peers]
        missing = ", ".join(absent[:8]) + (f" and {len(absent) - 8} more" if len(absent) > 8 else "")
        refused = f"; a process at {self.refused[0]} has another secret and was refused" if self.refused else ""
        return (
            f"only {len(self.peers) + 1} of {place.processes} processes reached {place.coordinator} within "
            f"{self.roll.seconds:g} s, missing: {missing}{refused}; check the logs of the missing ones, and that their "
            f"hosts reach this address"
        )

    def _send_result(self, peers: list[_Peer], error: str) -> None:
        for peer in peers:
            proof = self.roll.proof("coordinator", peer.nonce, peer.theirs, error)
            _send(peer.connection, {"error": error, "proof": proof})
        # The side that closes first keeps the port busy for a minute: the others close, all of them within this time.
        deadline = time.monotonic() + _CLOSE_SECONDS
        for peer in peers:
            with contextlib.suppress(OSError):
                while (left := deadline - time.monotonic()) > 0:
                    peer.connection.settimeout(left)
                    if not peer.connection.recv(4096):
                        break
            peer.connection.close()


def _answer(roll: RendezvousInfo) -> None:
    """Connect to process 0, as another process, and wait for its result."""
    place, deadline = roll.place, time.monotonic() + roll.seconds
    reason = "nothing answers there"
    for connection in _connections(place.coordinator, deadline):
        if isinstance(connection, str):
            reason = connection
            continue
        with connection:
            lines = _lines(connection, time.monotonic() + _GRACE_SECONDS)
            message = _parse_line(next(lines, b""))
            if message.get("panax") != _PROTOCOL or not isinstance(message.get("nonce"), str):
                reason = "the process that answers there is not process 0 of a Panax job"
                continue
            mine = secrets.token_hex(16)
            proof = roll.proof("worker", message["nonce"], mine, str(place.index))
            hello = {"index": place.index, "processes": place.processes, "facts": dict(roll.facts), "nonce": mine}
            _send(connection, {**hello, "proof": proof})
            # Process 0 may have begun to wait later.
            word = _parse_line(next(_lines(connection, time.monotonic() + roll.seconds + _GRACE_SECONDS), b""))
            error = word.get("error")
            expected = roll.proof("coordinator", message["nonce"], mine, str(error))
            if not isinstance(error, str) or not hmac.compare_digest(expected, str(word.get("proof"))):
                reason = "process 0 ended the connection without a message: it has ended, or has another secret"
                continue
        if error:
            raise JoinError(error)
        _until_jax_answers(place, deadline)
        return
    raise JoinError(
        f"process {place.index} of {place.processes} did not reach process 0 at {place.coordinator} within "
        f"{roll.seconds:g} s: {reason}; check that process 0 runs, its log, and that this host reaches that address"
    )


def _until_jax_answers(place: Membership, deadline: float) -> None:
    """Wait until JAX's coordinator answers, since JAX waits a second after a failed attempt."""
    for connection in _connections(place.coordinator, max(deadline, time.monotonic() + _GRACE_SECONDS)):
        if isinstance(connection, socket.socket):
            connection.close()
            return


def _connections(address: str, deadline: float) -> Iterator[socket.socket | str]:
    """Yield connections to an address, one after the other until the deadline; for a failed connection, the reason."""
    host, port = split_address(address, "the coordinator")
    while (left := deadline - time.monotonic()) > 0:
        try:
            yield socket.create_connection((host.strip("[]"), port), timeout=min(left, _GRACE_SECONDS))
        except OSError as error:
            yield (error.strerror or str(error)).lower()
        time.sleep(_PAUSE_SECONDS)


def _lines(connection: socket.socket, deadline: float) -> Iterator[bytes]:
    received = b""
    while b"\n" not in received and len(received) <= _LONGEST_LINE:
        remaining_seconds = deadline - time.monotonic()
        if remaining_seconds <= 0:
            return
        connection.settimeout(remaining_seconds)
        try:
            data = connection.recv(4096)
        except OSError:
            return
        if not data:
            return
        received += data
    yield received.partition(b"\n")[0]


def _send(connection: socket.socket, message: Mapping[str, Any]) -> bool:
    try:
        connection.sendall(json.dumps(message).encode() + b"\n")
    except OSError:
        return False
    return True


def _parse_line(line: bytes) -> dict[str, Any]:
    """Parse a line's JSON object; return an empty dict if the line is invalid."""
    try:
        found = json_reader.parse(line)
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}
