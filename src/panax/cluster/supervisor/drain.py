"""Nodes that are asked to end, one by one, while the job continues: evicted pods, machines that are
reclaimed."""

import signal
from collections.abc import Collection

from .nodes import Nodes
from .stop_request import StopRequest


class DrainingNodes:
    """Draining nodes of the current attempt.

    Args:
        asks: Receives the request to end the job, if all of its nodes are draining.
    """

    def __init__(self, nodes: Nodes, asks: StopRequest):
        self._nodes, self._asks = nodes, asks
        self._draining: set[int] = set()
        self._attempt_nodes: set[int] = set()

    def begin(self, nodes: Collection[int]) -> None:
        """Begin another attempt on some nodes; nodes that were draining before have gone."""
        self._draining, self._attempt_nodes = set(), set(nodes)

    def tell(self, node: int, *, can_save: bool) -> None:
        """Record that a node was asked to end.

        Args:
            can_save: True if the processes handle signals: all processes then save first. Otherwise the node is
                disconnected now.
        """
        if node in self._attempt_nodes:
            self._draining.add(node)
        if self._draining and self._draining >= self._attempt_nodes:
            self._asks.request(signal.SIGTERM, by_system=True)
        elif node not in self._attempt_nodes or not can_save:
            self._nodes.drop(node)

    def part(self) -> None:
        """Disconnect the agents of draining nodes, so that the scheduler that reclaims the nodes need not wait."""
        for node in self._draining:
            self._nodes.drop(node)

    def __str__(self) -> str:
        """Return why the job continues on other nodes; empty if no node is draining."""
        return f"node {', '.join(map(str, sorted(self._draining)))} was asked to end" if self._draining else ""
