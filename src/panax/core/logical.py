"""Logical axes: what each one means, where it lies by default, and the traits that general code acts by. Plain Python.

General code asks for a role or a trait, and compares no names. The axes of the layers that Panax ships are registered by
`layers/axes.py`, when `panax` is imported; a model with other axes registers its own.
"""

import dataclasses
import enum
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from .errors import LayoutError, nearest

MESH_AXES = ("replica", "stage", "fsdp", "expert", "context", "tensor")
"""Every mesh axis, slowest network first."""

MeshAxes = tuple[str, ...]

EACH: Mapping[str, MeshAxes] = MappingProxyType({f"each_{axis}": (axis,) for axis in MESH_AXES})
"""Logical axes of what each device along a mesh axis keeps for itself. They lie there whatever the rules say."""


class Role(enum.Enum):
    """What general code looks a logical axis up for; at most one axis has each."""

    ROWS = "rows of a batch"
    POSITIONS = "positions in a row"
    STREAM = "positions in a row, in the residual stream"
    WIDTH = "width of the residual stream, along which most weights rest split"
    LAYERS = "layers stacked in storage"


class Undivided(enum.Enum):
    """What becomes of a dimension that its mesh axes don't divide."""

    REFUSED = "an error, with the sizes that would divide"
    REPLICATED = "replicated over all of them"
    FEWER = "at rest split over as many of the first ones as divide it"
    OFF_STAGES = "at rest not split over the stages; an error if the others don't divide it either"
    ELECTIVE = "split over those that divide it, each array for itself"


@dataclasses.dataclass(frozen=True)
class LogicalAxis:
    """What one dimension of an array is, and how it may be laid out.

    Attributes:
        meaning: For readers.
        compute: The mesh axes that split it by default while it is computed with.
        storage: Those that split it where a parameter rests: all of `compute` first. None for the same ones.
        parallel: Layers compute its parts side by side, and sums over it are scattered into the residual stream: so it is split
            over the mesh axes that split the stream's positions further than those of a row, and over no others.
        may_be_whole: Of a parallel axis: each device may also compute all of it.
        single: Why no more than one mesh axis may split it, for the error message; empty where several may.
        in_float32: A parameter with this axis is gathered in float32 where weights are gathered once a step.
        read_out: A weight that ends in it reads something out of the model's width, and does not grow with it.
        copies: A parameter is many of a kind along it, as layers and experts are; optimizers see each by itself.
        table: A parameter that begins with it is a table: a step reads and changes only the rows that its batch asks for.

    >>> LogicalAxis("memory", "slots of a memory", compute=("tensor",), parallel=True).storage
    ('tensor',)
    """

    name: str
    meaning: str
    _: dataclasses.KW_ONLY
    compute: MeshAxes = ()
    storage: MeshAxes | None = None
    undivided: Undivided = Undivided.REFUSED
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
                    f"the logical axis {self.name!r} -> {mesh_axis!r} is not a mesh axis; {nearest(mesh_axis, MESH_AXES)}"
                )
        if storage and storage[: len(self.compute)] != self.compute:
            raise LayoutError(
                f"the logical axis {self.name!r} rests over {storage}, and is computed over {self.compute}; let the former begin "
                f"with the latter"
            )
        if not self.name.isidentifier():
            raise LayoutError(f"{self.name!r} can't name a logical axis; use letters, digits and underscores")


_axes: dict[str, LogicalAxis] = {}
_compute: dict[str, MeshAxes] = {}
_storage: dict[str, MeshAxes] = {}
_roles: dict[Role, str] = {}

LOGICAL_AXES: Mapping[str, LogicalAxis] = MappingProxyType(_axes)
"""Every registered axis by its name."""

COMPUTE: Mapping[str, MeshAxes] = MappingProxyType(_compute)
"""The default rules of computation; a logical axis that is not named is replicated."""

STORAGE: Mapping[str, MeshAxes] = MappingProxyType(_storage)
"""The default rules of what rests."""


def register_axes(*axes: LogicalAxis) -> None:
    """Make logical axes known, with their traits and default rules.

    Registering the same axis again changes nothing.

    Raises:
        LayoutError: An axis of that name has other traits, or another axis has its role.
    """
    for axis in axes:
        known = _axes.get(axis.name)
        if known == axis:
            continue
        if known is not None:
            differing = [f.name for f in dataclasses.fields(axis) if getattr(axis, f.name) != getattr(known, f.name)]
            raise LayoutError(
                f"the logical axis {axis.name!r} ({known.meaning}) is registered already, with another "
                f"{', another '.join(differing)}; take another name, or the same traits"
            )
        if axis.role is not None and axis.role in _roles:
            raise LayoutError(
                f"the logical axis {axis.name!r} has the role {axis.role.name}, which {_roles[axis.role]!r} has already; "
                f"call that dimension {_roles[axis.role]!r}, or leave out the role"
            )
        _axes[axis.name] = axis
        if axis.role is not None:
            _roles[axis.role] = axis.name
        if axis.compute:
            _compute[axis.name] = axis.compute
        if axis.storage:
            _storage[axis.name] = axis.storage


def axis_of(role: Role) -> str:
    """The name of the axis that has a role.

    >>> axis_of(Role.ROWS)
    'batch'
    """
    return _roles[role]


_UNKNOWN = LogicalAxis("unknown", "an axis that nobody registered")


def traits_of(name: str | None) -> LogicalAxis:
    """The axis of a name; one without any traits where it is not registered."""
    return _axes.get(name or "", _UNKNOWN)


def is_copies(name: str | None) -> bool:
    """Whether a parameter is many of a kind along a logical axis."""
    return traits_of(name).copies


def is_table(axes: tuple[str | None, ...]) -> bool:
    """Whether a parameter with these logical axes is a table, whose gradient is formed and applied as rows."""
    return bool(axes) and traits_of(axes[0]).table


def axes_of_rows(arrays: Mapping[str, Any]) -> dict[str, tuple[str | None, ...]]:
    """The logical axes of each leaf of a batch of which rows alone are split.

    Args:
        arrays: Whatever has a rank, `ndim`.
    """
    return {name: (axis_of(Role.ROWS), *(None,) * (array.ndim - 1)) for name, array in arrays.items()}
