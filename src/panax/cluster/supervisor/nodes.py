"""The supervisor's side of a job's agents: accepts and identifies them, and tracks lost agents."""

import contextlib
import selectors
import socket
import time
from collections.abc import Iterator
from typing import Any

from ...core.errors import LaunchError
from ..node.channel import Channel, Handshake, Message

SILENT_SECONDS = 30.0
"""Time without a message from an agent, which sends one every two seconds, until its host counts as lost."""

MAX_HANDSHAKES = 256
"""Maximum number of concurrent handshakes: a peer that does not know the secret occupies a slot for five
seconds in total. Further connections wait in the listener's queue."""

LISTEN_BACKLOG = 4096
"""Maximum number of connections waiting there; the system may allow fewer."""


class Node:
    """An agent that has connected: its connection, and the facts that it sent about its machine."""

    def __init__(self, channel: Channel):
        self.channel = channel
        self.facts: dict[str, Any] = {}
        self.number = -1
        self.parted = False
        self.heard = time.monotonic()

    @property
    def host(self) -> str:
        return str(self.facts.get("host", "?"))

    @property
    def address(self) -> str:
        return str(self.facts.get("address", ""))


class Nodes:
    """Agents of a job, by node number; node 0 has the job's first process.

    Attributes:
        lost: Numbers of nodes with agents that have disconnected and not returned.
        departed: Numbers and hosts of nodes with agents that have disconnected; the reader removes them.
        again: True if the engine may start the job again on these nodes, once all processes have ended.
    """

    def __init__(self, secret: str, count: int):
        self._secret, self._count = secret, count
        self._selector = selectors.DefaultSelector()
        self._listener: socket.socket | None = None
        self._listening = False
        self._greetings: set[Handshake] = set()
        self._coming: list[Node] = []
        self.here: dict[int, Node] = {}
        self.lost: set[int] = set()
        self.departed: list[tuple[int, str]] = []
        self.refused = 0
        self.again = False
        self._looked_at = time.monotonic()

    def listen(self, address: str, port: int = 0) -> str:
        """Accept agents at this address; return it as host:port.

        Args:
            port: 0 for any free port.

        Raises:
            LaunchError: The address is not one of this machine, or the port is in use.
        """
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        try:
            self._listener = socket.create_server((address, port), family=family, backlog=LISTEN_BACKLOG)
        except OSError as error:
            raise LaunchError(
                f"can't listen at {address}:{port}: {error.strerror}; expected an address of this machine, and a free port"
            ) from error
        self._listener.setblocking(False)
        raise_file_limit(self._count + 2 * MAX_HANDSHAKES)
        self._listen()
        bound_port = self._listener.getsockname()[1]
        return f"[{address}]:{bound_port}" if ":" in address else f"{address}:{bound_port}"

    def take(self, channel: Channel) -> None:
        """Accept an agent at the other end of a connection that the supervisor has opened itself."""
        node = Node(channel)
        self._coming.append(node)
        self._selector.register(channel, selectors.EVENT_READ, node)

    def messages(self, seconds: float) -> Iterator[tuple[Node, Message]]:
        """Yield agents' messages for up to some seconds; return after the first ones."""
        for node in [*self._coming, *self.here.values()]:
            if node.channel.has_pending:
                node.channel.flush()
        self._looked_at = time.monotonic()
        for key, _ in self._selector.select(seconds):
            if key.data is None:
                self._accept()
                continue
            if isinstance(key.data, Handshake):
                self._greet(key.data)
                continue
            node = key.data
            if node.parted:
                continue
            node.heard = time.monotonic()
            for message in node.channel.receive():
                if "hello" in message and node in self._coming:
                    self._welcome(node, message["hello"])
                elif node.number >= 0:
                    yield node, message
            if node.channel.closed:
                self._part_with(node)
        for greeting in [each for each in self._greetings if each.is_expired]:
            self._refuse(greeting)
        self._listen()

    def ping(self) -> None:
        """Send a heartbeat to all agents, and disconnect those that have been silent for too long."""
        for node in list(self.here.values()):
            node.channel.send(ping=True)
            # Up to the last look, not up to now: this process may have been suspended since, and has not read since.
            if self._looked_at - node.heard > SILENT_SECONDS:
                self._part_with(node)

    def tell(self, number: int | None = None, **message: Any) -> None:
        """Send a message to one agent, or to all."""
        for node in list(self.here.values()) if number is None else [self.here[number]]:
            node.channel.send(**message)

    def close(self) -> None:
        """Disconnect all agents: each ends its workers, and itself."""
        for node in [*self._coming, *self.here.values()]:
            node.channel.send(end="again" if self.again else True)
            node.channel.close()
        self._coming, self.here = [], {}
        for greeting in self._greetings:
            greeting.close()
        if self._listener is not None:
            self._listener.close()
        self._selector.close()

    def _listen(self) -> None:
        """Accept connections while there are free slots for handshakes."""
        should_listen = self._listener is not None and len(self._greetings) < MAX_HANDSHAKES
        if should_listen != self._listening and self._listener is not None:
            self._listening = should_listen
            if should_listen:
                self._selector.register(self._listener, selectors.EVENT_READ, None)
            else:
                self._selector.unregister(self._listener)

    def _accept(self) -> None:
        assert self._listener is not None
        with contextlib.suppress(OSError):  # none left, or one that has gone again
            while len(self._greetings) < MAX_HANDSHAKES:
                connection, _ = self._listener.accept()
                try:
                    greeting = Handshake(connection, self._secret)
                except OSError:
                    connection.close()
                    continue
                self._greetings.add(greeting)
                self._selector.register(greeting, selectors.EVENT_READ, greeting)

    def _greet(self, greeting: Handshake) -> None:
        if greeting not in self._greetings:
            return
        try:
            channel = greeting.advance()
        except OSError:
            self._refuse(greeting)
            return
        if channel is not None:
            self._greetings.remove(greeting)
            self._selector.unregister(greeting)
            self.take(channel)

    def _refuse(self, greeting: Handshake) -> None:
        self.refused += 1
        self._greetings.remove(greeting)
        self._selector.unregister(greeting)
        greeting.close()

    def _welcome(self, node: Node, facts: Any) -> None:
        self._coming.remove(node)
        if not isinstance(facts, dict):
            self._part_with(node)
            return
        node.facts = facts
        requested_number = str(facts.get("node", ""))
        free = [number for number in range(self._count) if number not in self.here]
        number = int(requested_number) if requested_number.isdecimal() else free[0] if free else self._count
        if number >= self._count:
            # More nodes than the job has.
            self._part_with(node)
            return
        if number in self.here:
            # The engine has started another one: the previous connection ended silently.
            self._part_with(self.here[number])
        node.number = number
        self.here[number] = node
        self.lost.discard(number)

    @property
    def complete(self) -> bool:
        """Return True if all of the job's nodes are connected."""
        return len(self.here) == self._count

    def drop(self, number: int) -> None:
        """Disconnect an agent that does not respond to requests."""
        if number in self.here:
            self._part_with(self.here[number])

    def _part_with(self, node: Node) -> None:
        if node.parted:
            return
        node.parted = True
        self._selector.unregister(node.channel)
        node.channel.close()
        if node in self._coming:
            self._coming.remove(node)
        if node.number >= 0:
            self.lost.add(node.number)
            self.departed.append((node.number, node.host))
            del self.here[node.number]


def raise_file_limit(count: int) -> None:
    """Raise this process's limit of open files by `count`, as far as the system allows it without
    privileges."""
    import resource  # absent on Windows

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = soft + count if hard == resource.RLIM_INFINITY else min(soft + count, hard)
    if soft != resource.RLIM_INFINITY and wanted > soft:
        with contextlib.suppress(ValueError, OSError):  # the system has a lower limit
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
