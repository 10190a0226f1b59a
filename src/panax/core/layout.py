"""Which mesh axes an array's logical axes lie on, as the model sees it while it is traced.

The model names axes; the mesh room decides where they lie. Between the two stands this context: `contract`, `gather` and
`whole_sequence` ask it which mesh axes to communicate over. Without one (a laptop, a test, the debugger, a task that
is left to automatic sharding) everything is on one device, as far as the model can see.
"""

import contextlib
from collections.abc import Iterator, Mapping
from contextvars import ContextVar
from typing import Protocol, runtime_checkable

import jax

from .protocols import Axes

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
    def platform(self) -> str:
        """The target's platform ("cpu", "gpu" or "tpu"), which need not be that of the attached devices."""
        ...

    @property
    def zero(self) -> str:
        """ "1", "2" or "3": what of a step is sharded; see `mesh.Rules`."""
        ...

    @property
    def overlap(self) -> bool:
        """Whether gathers and scatters along the sequence are run as rings beside their products."""
        ...

    def without(self, axis: str) -> "Layout":
        """The same mesh with nothing laid along `axis`: what a pipeline's stage sees of its own layers."""
        ...

    def compute(self, axes: Axes) -> tuple[MeshAxes, ...]:
        """The mesh axes above size 1 that each dimension is split over while it is computed with."""
        ...

    def storage(self, axes: Axes) -> tuple[MeshAxes, ...]:
        """The same for a parameter between its uses."""
        ...


_layout: ContextVar[Layout | None] = ContextVar("panax_layout", default=None)


def current_layout() -> Layout | None:
    """The layout that is being traced for; None on a single device, where nothing is placed anywhere."""
    layout = _layout.get()
    return None if layout is None or layout.mesh.size == 1 else layout


def current_platform() -> str:
    """The platform of the layout that is being traced for, else that of JAX's default backend."""
    layout = _layout.get()
    return jax.default_backend() if layout is None else layout.platform


@contextlib.contextmanager
def use_layout(layout: Layout | None) -> Iterator[None]:
    """Trace what is inside for `layout`."""
    token = _layout.set(layout)
    try:
        yield
    finally:
        _layout.reset(token)


def axis_size(axis: str) -> int:
    """The size of a mesh axis; 1 outside of a mesh."""
    layout = current_layout()
    return 1 if layout is None else layout.sizes.get(axis, 1)
