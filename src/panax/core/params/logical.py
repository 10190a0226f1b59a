"""Logical axes: their meaning, default sharding and traits. Plain Python.

General code asks for a role or a trait, never compares names. The axes of Panax's layers are registered by
`layers/axes.py` when `panax` is imported; a model with other axes registers its own.
"""

import dataclasses
import enum
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from ..errors import LayoutError, suggest_name

MESH_AXES = ("replica", "stage", "fsdp", "expert", "context", "tensor")
"""All mesh axes, slowest network first."""

MeshAxes = tuple[str, ...]

LOCAL_AXES: Mapping[str, MeshAxes] = MappingProxyType({f"each_{axis}": (axis,) for axis in MESH_AXES})
"""Logical axes of values that each device along a mesh axis stores independently; their sharding ignores the
rules.
"""


class Role(enum.Enum):
    """Role by which general code looks up a logical axis; at most one axis has each."""

    ROWS = "rows of a batch"
    POSITIONS = "positions in a row"
    STREAM = "positions in a row, in the residual stream"
    WIDTH = "width of the residual stream, along which most weights are stored split"
    LAYERS = "layers stacked in storage"


class DivisibilityPolicy(enum.Enum):
    """Treatment of a dimension that its mesh axes do not divide."""

    REFUSED = "an error, with the sizes that would divide"
    REPLICATED = "replicated over all of them"
    FEWER = "stored split over as many of the first ones as divide it"
    OFF_STAGES = "stored unsplit over the stages; an error if the others don't divide it either"
    ELECTIVE = "split over those that divide it, each array for itself"


@dataclasses.dataclass(frozen=True)
class LogicalAxis:
    """The meaning of an array dimension, and how it may be sharded.

    Attributes:
        meaning: For readers.
        compute: Mesh axes that shard it by default in computation.
        storage: Mesh axes that shard it by default in a stored parameter: all of `compute` first. By default
            the same ones.
        undivided: Treatment if its mesh axes do not divide it.
        role: The role by which general code finds it, if any.
        parallel: True if layers compute its parts on different devices, and sums over it are scattered into
            the residual stream. It is then sharded over exactly the mesh axes that shard the stream's
            positions further than those of a row.
        may_be_whole: For a parallel axis, True if each device may also compute all of it.
        single: Why at most one mesh axis may shard it, for the error message; empty if several may.
        in_float32: True if a parameter with this axis is gathered in float32 when weights are gathered once
            per step.
        read_out: True if a weight that ends in it maps the model's width to an output, and does not grow with
            the width.
        copies: True if a parameter holds many items of one kind along it, such as layers or experts;
            optimizers treat each item separately.
        table: True if a parameter that begins with it is an embedding table: a step reads and changes only
            the rows that its batch requests.

    >>> LogicalAxis("memory", "slots of a memory", compute=("tensor",), parallel=True).storage
    ('tensor',)
    """

    name: str
    meaning: str
    _: dataclasses.KW_ONLY
    compute: MeshAxes = ()
    storage: MeshAxes | None = None
    undivided: DivisibilityPolicy = DivisibilityPolicy.REFUSED
    role: Role | None = None
    parallel: bool = False
    may_be_whole: bool = False
    single: str = ""
    in_float32: bool = False
    read_out: bool = False
    copies: bool = False
    table: bool = False

    def __post_init__(self) -> None:
        if self.storage is None:
            object.__setattr__(self, "storage", self.compute)
        storage = self.storage or ()
        for mesh_axis in (*self.compute, *storage):
            if mesh_axis not in MESH_AXES:
                raise LayoutError(
                    f"the logical axis {self.name!r} -> {mesh_axis!r} is not a mesh axis; {suggest_name(mesh_axis, MESH_AXES)}"
                )
        if storage and storage[: len(self.compute)] != self.compute:
            raise LayoutError(
                f"the logical axis {self.name!r} is stored over {storage}, and computed over {self.compute}; the storage "
                f"axes must begin with those of compute"
            )
        if not self.name.isidentifier():
            raise LayoutError(f"{self.name!r} can't name a logical axis; use letters, digits and underscores")


_axes: dict[str, LogicalAxis] = {}
_compute: dict[str, MeshAxes] = {}
_storage: dict[str, MeshAxes] = {}
_roles: dict[Role, str] = {}

LOGICAL_AXES: Mapping[str, LogicalAxis] = MappingProxyType(_axes)
"""Axis name to axis, for every registered axis."""

COMPUTE: Mapping[str, MeshAxes] = MappingProxyType(_compute)
"""Default sharding in computation; a logical axis that is not listed is replicated."""

STORAGE: Mapping[str, MeshAxes] = MappingProxyType(_storage)
"""Default sharding in storage."""


def register_axes(*axes: LogicalAxis) -> None:
    """Register logical axes with their traits and default sharding.

    Registering the same axis again has no effect.

    Raises:
        LayoutError: An axis of the same name has other traits, or another axis has its role.
    """
    for axis in axes:
        known = _axes.get(axis.name)
        if known == axis:
            continue
        if known is not None:
            differing = [f.name for f in dataclasses.fields(axis) if getattr(axis, f.name) != getattr(known, f.name)]
            raise LayoutError(
                f"the logical axis {axis.name!r} ({known.meaning}) is registered already, with another "
                f"{', another '.join(differing)}; choose another name, or the same traits"
            )
        if axis.role is not None and axis.role in _roles:
            raise LayoutError(
                f"the logical axis {axis.name!r} has the role {axis.role.name}, which {_roles[axis.role]!r} has "
                f"already; call that dimension {_roles[axis.role]!r}, or remove the role"
            )
        _axes[axis.name] = axis
        if axis.role is not None:
            _roles[axis.role] = axis.name
        if axis.compute:
            _compute[axis.name] = axis.compute
        if axis.storage:
            _storage[axis.name] = axis.storage


def axis_for_role(role: Role) -> str:
    """Return the name of the axis that has a role.

    >>> axis_for_role(Role.ROWS)
    'batch'
    """
    return _roles[role]


_UNKNOWN = LogicalAxis("unknown", "an unregistered axis")


def lookup_axis(name: str | None) -> LogicalAxis:
    """Return the axis of a name; one without any traits if it is not registered."""
    return _axes.get(name or "", _UNKNOWN)


def is_stack_axis(name: str | None) -> bool:
    """Return True if a parameter holds many items of one kind along a logical axis."""
    return lookup_axis(name).copies


def is_table(axes: tuple[str | None, ...]) -> bool:
    """Return True if a parameter with these logical axes is a table, with a gradient that is computed and
    applied by rows.
    """
    return bool(axes) and lookup_axis(axes[0]).table


def batch_row_axes(arrays: Mapping[str, Any]) -> dict[str, tuple[str | None, ...]]:
    """Return the logical axes of each leaf of a batch in which only rows are sharded.

    Args:
        arrays: Objects that have a rank, `ndim`.
    """
    return {name: (axis_for_role(Role.ROWS), *(None,) * (array.ndim - 1)) for name, array in arrays.items()}
