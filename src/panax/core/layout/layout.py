"""The mesh axes of an array's logical axes, as visible to the model while it is traced.

The model names logical axes; `panax.mesh` decides how they are sharded. This context connects the two:
`contract`, `gather` and `all_gather_sequence` ask it for the mesh axes to communicate over. Without it (a
laptop, a test, the debugger, a task left to automatic sharding) the model sees a single device.
"""

import contextlib
from collections.abc import Iterator, Mapping
from contextvars import ContextVar
from typing import NamedTuple, Protocol, runtime_checkable

import jax
import jax.extend.backend

from ..protocols import Axes, RowOrder
from .target import Target, device_target
from .zero_stage import ZeroStage

MeshAxes = tuple[str, ...]


@runtime_checkable
class Layout(Protocol):
    """A mesh and its two sharding rules, for computation and for storage."""

    @property
    def mesh(self) -> jax.sharding.Mesh: ...

    @property
    def sizes(self) -> Mapping[str, int]:
        """Return the sizes of the mesh axes, slowest network first."""
        ...

    @property
    def target(self) -> Target:
        """Return the hardware of the mesh, which need not be attached."""
        ...

    @property
    def zero(self) -> ZeroStage:
        """Return the ZeRO stage, which determines the sharded parts of a step."""
        ...

    @property
    def local_axes(self) -> MeshAxes:
        """Return the mesh axes along which each device works independently: they count as size 1, and nothing
        is sent over them."""
        ...

    @property
    def overlap(self) -> bool:
        """Return True if gathers and scatters along the sequence run as rings that overlap with their
        matmuls."""
        ...

    @property
    def weight_gather_dtype(self) -> str:
        """Format in which weights are gathered, "same", "int8" or "float8"; see `mesh.Rules`."""
        ...

    @property
    def row_order(self) -> RowOrder:
        """Return the order of the positions of a row on the devices of the context axis."""
        ...

    def with_local_axis(self, axis: str) -> "Layout":
        """Return the same mesh as seen by one device along `axis`, which works independently."""
        ...

    def without_axis(self, axis: str) -> "Layout":
        """Return the same mesh with nothing sharded along `axis`: a pipeline stage's view of its layers."""
        ...

    def with_whole_rows(self) -> "Layout":
        """Return the same mesh with unsharded rows: devices along axes that shard a row's positions do the same
        work; parameters stay sharded as they are.
        """
        ...

    def with_rows_over(self, axis: str) -> "Layout":
        """Return the same mesh with rows also sharded over `axis`: a pipeline stage's view of its share of
        the loss.
        """
        ...

    def compute(self, axes: Axes) -> tuple[MeshAxes, ...]:
        """Return, for each dimension, the mesh axes above size 1 that shard it in computation."""
        ...

    def storage(self, axes: Axes, shape: tuple[int, ...] | None = None) -> tuple[MeshAxes, ...]:
        """Return, for each dimension, the mesh axes above size 1 that shard a parameter between uses.

        Args:
            shape: Shape of the global array. Without it, axes that shard only dimensions that they divide are
                assumed to divide these.
        """
        ...


class _Traced(NamedTuple):
    layout: Layout | None
    is_global: bool = False


_NOWHERE = _Traced(None)
_traced: ContextVar[_Traced] = ContextVar("panax_layout", default=_NOWHERE)


def current_layout() -> Layout | None:
    """Return the layout that is being traced for; None if the traced code sees one device or global arrays."""
    layout, is_global = _traced.get()
    return None if layout is None or is_global or layout.mesh.size == 1 else layout


def current_target() -> Target:
    """Return the target of the layout that is being traced for, or of JAX's default device."""
    layout = _traced.get().layout
    return device_target(jax.extend.backend.get_default_device()) if layout is None else layout.target


def arrays_are_local() -> bool:
    """Return True if each traced array is on a single device, as assumed without a layout.

    Otherwise XLA's partitioner may shard them, which it cannot do with custom calls.
    """
    layout, is_global = _traced.get()
    return layout is None or layout.mesh.size == 1 or not is_global


@contextlib.contextmanager
def use_layout(layout: Layout | None) -> Iterator[None]:
    """Trace code inside for `layout`."""
    token = _traced.set(_Traced(layout))
    try:
        yield
    finally:
        _traced.reset(token)


@contextlib.contextmanager
def use_global_arrays() -> Iterator[None]:
    """Trace code inside for the same target without its mesh: on global arrays, which XLA's partitioner
    shards.
    """
    token = _traced.set(_traced.get()._replace(is_global=True))
    try:
        yield
    finally:
        _traced.reset(token)


def axis_size(axis: str) -> int:
    """Return the size of a mesh axis; 1 outside of a mesh."""
    layout = current_layout()
    return 1 if layout is None else layout.sizes.get(axis, 1)


def row_order() -> RowOrder:
    """Return the order of the positions of a row on the devices of the context axis.

    It is zigzag outside of a mesh, where it makes no difference.
    """
    layout = current_layout()
    return "zigzag" if layout is None else layout.row_order
