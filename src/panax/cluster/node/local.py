"""This machine as an engine: the supervisor starts agents itself, and communicates by unnamed sockets."""

import os
import socket
import subprocess
import sys

from ...system.children import end_process
from ..engines import AGENT_COMMAND
from ..engines.environment import NODE, SECRET
from ..supervisor.nodes import Nodes
from .agent import CONNECTION_VARIABLE
from .channel import Channel

END_SECONDS, GONE_SECONDS = 25.0, 2.0
"""Time for an agent to end its workers; and if it was disconnected from the supervisor before."""


class LocalAgents:
    """Agents on this machine."""

    def __init__(self, nodes: Nodes, count: int, secret: str):
        self._nodes, self._secret = nodes, secret
        self._agents: dict[int, subprocess.Popen[bytes]] = {}
        for number in range(count):
            self._begin(number)

    def failure(self) -> str:
        return ""

    def log_tail(self) -> str:
        return ""

    def replace(self, node: int) -> None:
        # Its connection has ended, so it has ended too, or hangs.
        end_process(self._agents.pop(node), GONE_SECONDS)
        self._begin(node)

    def start_over(self, *, preempted: bool = False) -> int | None:
        return None

    def close(self) -> None:
        for agent in self._agents.values():
            end_process(agent, END_SECONDS)
        self._agents = {}

    def _begin(self, number: int) -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            environment = {
                **os.environ,
                CONNECTION_VARIABLE: str(theirs.fileno()),
                SECRET: self._secret,
                NODE: str(number),
            }
            self._agents[number] = subprocess.Popen(
                AGENT_COMMAND,
                stdin=subprocess.DEVNULL,
                stdout=sys.stderr if _is_file(sys.stderr) else subprocess.DEVNULL,
                pass_fds=(theirs.fileno(),),
                env=environment,
                # The terminal's signals are for the supervisor.
                start_new_session=True,
            )
        self._nodes.take(Channel(ours))


def _is_file(stream: object) -> bool:
    try:
        return stream.fileno() >= 0  # pyright: ignore[reportAttributeAccessIssue]
    except (AttributeError, OSError, ValueError):
        return False
