"""Nodes that are told to end, one by one, while the job goes on: pods that are evicted, machines that are taken away."""

import signal
from collections.abc import Collection

from .nodes import Nodes
from .stop_request import StopRequest


class DrainingNodes:
    """Those of the world that runs now.

    Args:
        asks: Is asked to end the job where all of its nodes are told to.
    """

    def __init__(self, nodes: Nodes, asks: StopRequest):
        self._nodes, self._asks = nodes, asks
        self._told: set[int] = set()
        self._world: set[int] = set()

    def begin(self, world: Collection[int]) -> None:
        """Another world runs; whoever was told before has gone."""
        self._told, self._world = set(), set(world)

    def tell(self, node: int, *, can_save: bool) -> None:
        """Take in that a node was told to end.

        Args:
            can_save: Whether the processes take signals: all of them save first then. Otherwise the node is lost now.
        """
        if node in self._world:
            self._told.add(node)
        if self._told and self._told >= self._world:
            self._asks.request(signal.SIGTERM, by_system=True)
        elif node not in self._world or not can_save:
            self._nodes.drop(node)

    def part(self) -> None:
        """Their agents end, so that whoever told them to need not wait."""
        for node in self._told:
            self._nodes.drop(node)

    def __str__(self) -> str:
        """Why the job goes on in another world; empty where no node leaves."""
        return f"node {', '.join(map(str, sorted(self._told)))} was told to end" if self._told else ""
