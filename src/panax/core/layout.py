"""Which mesh axes an array's logical axes lie on, as the model sees it while it is traced.

The model names axes; the mesh room decides where they lie. Between the two stands this context: `contract`, `gather` and
`constrain` ask it for a `PartitionSpec`. Without one (a laptop, a test, the debugger) everything is on one device.
"""

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar
from typing import Protocol, runtime_checkable

import jax
from jax.sharding import PartitionSpec

from .protocols import Axes


@runtime_checkable
class Layout(Protocol):
    """A mesh and its two rule dictionaries."""

    @property
    def mesh(self) -> jax.sharding.AbstractMesh: ...

    @property
    def platform(self) -> str:
        """The target's platform ("cpu", "gpu" or "tpu"), which need not be that of the attached devices."""
        ...

    def compute_spec(self, axes: Axes) -> PartitionSpec:
        """Where an array with these logical axes lies while it is computed with."""
        ...

    def storage_spec(self, axes: Axes) -> PartitionSpec:
        """Where a parameter with these logical axes rests between its uses."""
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
