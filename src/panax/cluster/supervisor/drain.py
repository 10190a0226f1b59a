"""Nodes that are told to end, one by one, while the job continues: evicted pods, machines that are taken
away."""

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
        self._told: set[int] = set()
        self._world: set[int] = set()

    def begin(self, world: Collection[int]) -> None:
        """Begin another attempt on some nodes; nodes that were draining before have gone."""
        self._told, self._world = set(), set(world)

    def tell(self, node: int, *, can_save: bool) -> None:
        """Record that a node was asked to end.

        Args:
            can_save: True if the processes handle signals: then all of them save first. Otherwise the node is
                lost now.
        """
        if node in self._world:
            self._told.add(node)
        if self._told and self._told >= self._world:
            self._asks.request(signal.SIGTERM, by_system=True)
        elif node not in self._world or not can_save:
            self._nodes.drop(node)

    def part(self) -> None:
        """Disconnect the agents of draining nodes, so that the scheduler that reclaims the nodes need not wait."""
        for node in self._told:
            self._nodes.drop(node)

    def __str__(self) -> str:
        """Return why the job continues on other nodes; empty if no node is draining."""
        return f"node {', '.join(map(str, sorted(self._told)))} was asked to end" if self._told else ""
