"""Where arrays lie: mesh shapes, the two rule dictionaries, legality, placement."""

from .placement import Placement
from .rules import COMPUTE, LOGICAL_AXES, MESH_AXES, STORAGE, Rules, assign
from .topology import MeshShape, data_parallel_size

__all__ = [
    "COMPUTE", "LOGICAL_AXES", "MESH_AXES", "STORAGE", "MeshShape", "Placement", "Rules", "assign", "data_parallel_size",
]  # fmt: skip
