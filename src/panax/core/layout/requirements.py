"""Requirements of a task on a mesh, in addition to dimensions that divide. Plain values, readable without
jax.
"""

from typing import NamedTuple


class PipelineRequirement(NamedTuple):
    """How a pipeline partitions a model.

    Attributes:
        units: Number of units; adjacent layers that must stay on one stage count as one.
        chunks: Groups of units per stage.
        repeats: Number of equal, adjacent parts of the stored layers: periods of a model with a single stack;
            0 with several stacks.
    """

    units: int
    chunks: int
    repeats: int

    def can_store_on(self, stages: int) -> bool:
        """Return True if each of `stages` computes equal, adjacent layers, which can then be stored there
        between steps.

        >>> PipelineRequirement(126, 1, 126).can_store_on(16), PipelineRequirement(126, 1, 126).can_store_on(18)
        (False, True)
        """
        return self.chunks == 1 and self.repeats > 0 and self.repeats % stages == 0


class AllToAllRequirement(NamedTuple):
    """Number of parts that are exchanged whole over a mesh axis, which must divide it.

    Attributes:
        what: The exchange, for an error message: "ulysses attention exchanges whole heads".
        unit: Name of the parts.
        total: Number of parts of a whole layer.
        axis: Mesh axis over which they are exchanged; at size 1 there is no requirement.
        split_axis: Mesh axis that already shards them.
        advice: An alternative fix for the user.
    """

    what: str
    unit: str
    total: int
    axis: str
    split_axis: str
    advice: str
