"""What a task asks of a mesh besides that arrays divide over it. Plain values: a supervisor reads them without jax."""

from typing import NamedTuple


class Pipelined(NamedTuple):
    """What a pipeline divides of a model.

    Attributes:
        units: Adjacent layers that stay on one stage count as one.
        chunks: Groups of units on each stage.
        repeats: Equal, adjacent parts that the stored layers fall into: periods of a model's only stack; 0 where it has more.
    """

    units: int
    chunks: int
    repeats: int

    def rest_on(self, stages: int) -> bool:
        """Whether each of `stages` computes equal, adjacent layers, which can then rest on it between steps.

        >>> Pipelined(126, 1, 126).rest_on(16), Pipelined(126, 1, 126).rest_on(18)
        (False, True)
        """
        return self.chunks == 1 and self.repeats > 0 and self.repeats % stages == 0


class AllToAllRequirement(NamedTuple):
    """A number of parts that are exchanged whole over a mesh axis, which must divide it.

    Attributes:
        what: Of what, in words for an error: "ulysses attention exchanges whole heads".
        parts: What they are called.
        total: How many a whole layer has.
        axis: The mesh axis over which they are exchanged; of size 1, nothing is asked.
        beside: A mesh axis that splits them already.
        otherwise: What else a user may do.
    """

    what: str
    parts: str
    total: int
    axis: str
    beside: str
    otherwise: str
