"""Which mesh axes an array's logical axes lie on, as the model sees it while it is traced.

The model names axes; the mesh room decides where they lie. Between the two stands this context: `contract`, `gather` and
`all_gather_sequence` ask it which mesh axes to communicate over. Without one (a laptop, a test, the debugger, a task that
is left to automatic sharding) everything is on one device, as far as the model can see.
"""

import contextlib
from collections.abc import Iterator, Mapping
from contextvars import ContextVar
from typing import NamedTuple, Protocol, runtime_checkable

import jax
import jax.extend.backend

from .protocols import Axes, RowOrder
from .target import Target, target_of

MeshAxes = tuple[str, ...]


@runtime_checkable
class Layout(Protocol):
    """A mesh and its two rule dictionaries."""

    @property
    def mesh(self) -> jax.sharding.Mesh: ...

    @property
    def sizes(self) -> Mapping[str, int]:
        """Mesh axis to size, slowest network first."""
        ...

    @property
    def target(self) -> Target:
        """What the mesh is made of, which need not be attached."""
        ...

    @property
    def zero(self) -> str:
        """ "1", "2" or "3": what of a step is sharded; see `mesh.Rules`."""
        ...

    @property
    def each(self) -> MeshAxes:
        """The mesh axes along which each device works by itself: they count as of size 1, and nothing is sent over them."""
        ...

    @property
    def overlap(self) -> bool:
        """Whether gathers and scatters along the sequence are run as rings beside their products."""
        ...

    @property
    def gathered_as(self) -> str:
        """ "same", "int8" or "float8": what weights travel as; see `mesh.Rules`."""
        ...

    @property
    def row_order(self) -> RowOrder:
        """Which positions of a row the devices of the context axis hold."""
        ...

    def of_each(self, axis: str) -> "Layout":
        """The same mesh as one device along `axis` sees it, which works by itself."""
        ...

    def without(self, axis: str) -> "Layout":
        """The same mesh with nothing laid along `axis`: what a pipeline's stage sees of its own layers."""
        ...

    def with_whole_rows(self) -> "Layout":
        """The same mesh, where the axes that split rows' positions compute alike: parameters rest as they are."""
        ...

    def with_rows_over(self, axis: str) -> "Layout":
        """The same mesh with rows split over `axis` too: what a pipeline's stage sees of its share of the loss."""
        ...

    def compute(self, axes: Axes) -> tuple[MeshAxes, ...]:
        """The mesh axes above size 1 that each dimension is split over while it is computed with."""
        ...

    def storage(self, axes: Axes, shape: tuple[int, ...] | None = None) -> tuple[MeshAxes, ...]:
        """The same for a parameter between its uses.

        Args:
            shape: Of the whole array; without it, axes that split what they can are taken to divide.
        """
        ...


class _Traced(NamedTuple):
    layout: Layout | None
    whole: bool = False


_NOWHERE = _Traced(None)
_traced: ContextVar[_Traced] = ContextVar("panax_layout", default=_NOWHERE)


def current_layout() -> Layout | None:
    """The layout that is being traced for; None where what is traced sees one device, or whole arrays."""
    layout, whole = _traced.get()
    return None if layout is None or whole or layout.mesh.size == 1 else layout


def current_target() -> Target:
    """The target of the layout that is being traced for, else JAX's default device."""
    layout = _traced.get().layout
    return target_of(jax.extend.backend.get_default_device()) if layout is None else layout.target


def arrays_are_local() -> bool:
    """Whether the arrays that are traced now lie on one device each; else XLA's partitioner may split them, but no custom call.

    Without a layout they do, as far as anybody can see.
    """
    layout, whole = _traced.get()
    return layout is None or layout.mesh.size == 1 or not whole


@contextlib.contextmanager
def use_layout(layout: Layout | None) -> Iterator[None]:
    """Trace what is inside for `layout`."""
    token = _traced.set(_Traced(layout))
    try:
        yield
    finally:
        _traced.reset(token)


@contextlib.contextmanager
def whole_arrays() -> Iterator[None]:
    """Trace what is inside for the same target, without its mesh: whole arrays, which XLA's partitioner splits."""
    token = _traced.set(_traced.get()._replace(whole=True))
    try:
        yield
    finally:
        _traced.reset(token)


def axis_size(axis: str) -> int:
    """The size of a mesh axis; 1 outside of a mesh."""
    layout = current_layout()
    return 1 if layout is None else layout.sizes.get(axis, 1)


def row_order() -> RowOrder:
    """Which positions of a row the devices of the context axis hold; zigzag outside of a mesh, where it makes no difference."""
    layout = current_layout()
    return "zigzag" if layout is None else layout.row_order
