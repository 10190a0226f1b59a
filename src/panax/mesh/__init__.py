"""Sharding of arrays over devices: mesh shapes, sharding rules, legality checks and placement."""

from typing import TYPE_CHECKING

from ..core.lazy import lazy_getattr

if TYPE_CHECKING:
    from .placement import Placement
    from .rules import COMPUTE, LOGICAL_AXES, MESH_AXES, STORAGE, Rules, assign
    from .topology import MeshShape, data_parallel_size

_WHERE = {
    "placement": ("Placement",),
    "rules": ("COMPUTE", "LOGICAL_AXES", "MESH_AXES", "Rules", "STORAGE", "assign"),
    "topology": ("MeshShape", "data_parallel_size"),
}

__getattr__ = lazy_getattr(__name__, _WHERE)

__all__ = [
    "COMPUTE", "LOGICAL_AXES", "MESH_AXES", "STORAGE", "MeshShape", "Placement", "Rules", "assign",
    "data_parallel_size",
]  # fmt: skip
