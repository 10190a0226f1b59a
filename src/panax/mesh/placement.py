"""`Placement`: a mesh of devices with its rules; answers where each array lies, and puts it there."""

import contextlib
import dataclasses
import math
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec, Sharding, SingleDeviceSharding

from ..core.axes import map_axes, pair_axes
from ..core.errors import LayoutError
from ..core.layout import use_layout
from ..core.protocols import Axes
from .rules import MESH_AXES, MeshAxes, Rules, assign
from .topology import MeshShape


@dataclasses.dataclass(frozen=True)
class Placement:
    """A mesh with explicit axes and the rules that map logical axes to it (implements `core.Layout`).

    On a single device there is nothing to place: programs are traced without a mesh there, and arrays are plain ones.

    Attributes:
        devices: The mesh; all axes are named, also those of size 1, so that a spec means the same on every mesh.
        rules: Where each logical axis lies.
    """

    devices: Mesh
    rules: Rules = dataclasses.field(default_factory=Rules)

    @classmethod
    def create(cls, shape: MeshShape | None = None, rules: Rules | None = None, devices: Any = None) -> "Placement":
        """Lay `devices` (all of JAX's unless told) out as a mesh.

        Raises:
            LayoutError: The shape does not fit the number of devices.
        """
        devices = jax.devices() if devices is None else list(devices)
        sizes = (shape or MeshShape()).resolve(len(devices))
        used = devices[: math.prod(sizes.values())]
        grid = np.array(used).reshape([sizes[axis] for axis in MESH_AXES])
        return cls(Mesh(grid, MESH_AXES, axis_types=(AxisType.Explicit,) * len(MESH_AXES)), rules or Rules())

    @property
    def mesh(self) -> jax.sharding.AbstractMesh:
        return self.devices.abstract_mesh

    @property
    def platform(self) -> str:
        platform = self.devices.devices.flat[0].platform
        return "gpu" if platform in ("cuda", "rocm") else platform

    @property
    def sizes(self) -> dict[str, int]:
        """Mesh axis to size."""
        return dict(zip(MESH_AXES, self.devices.devices.shape))

    def compute_spec(self, axes: Axes) -> PartitionSpec:
        return self._spec(axes, None, self.rules.compute)

    def storage_spec(self, axes: Axes) -> PartitionSpec:
        return self._spec(axes, None, self.rules.storage)

    def _spec(
        self, axes: Axes, shape: tuple[int, ...] | None, rules: Mapping[str, MeshAxes], name: str = "array"
    ) -> PartitionSpec:
        parts = assign(axes, shape, rules, self.sizes, name)
        return PartitionSpec(*(None if not p else p[0] if len(p) == 1 else p for p in parts))

    def storage_shardings(self, tree: Any, axes: Any) -> Any:
        """A sharding for each (abstract) parameter or state leaf.

        Raises:
            LayoutError: A dimension does not divide, naming the parameter.
        """
        for name, leaf, leaf_axes in pair_axes(tree, axes):
            assign(leaf_axes, leaf.shape, self.rules.storage, self.sizes, name)
            # What can't be computed with can't be stored either: heads that don't divide show up here, before a compile.
            assign(leaf_axes, leaf.shape, self.rules.compute, self.sizes, name)
        return map_axes(lambda leaf, a: self.sharding(*self.storage_spec(a)), tree, axes)

    def sharding(self, *spec: Any) -> Sharding:
        """The sharding of a given spec on this mesh; without arguments, replicated."""
        if self.devices.size == 1:
            return SingleDeviceSharding(self.devices.devices.flat[0])
        return NamedSharding(self.devices, PartitionSpec(*spec))

    def batch_shardings(self, batch: Mapping[str, Any], axes: Mapping[str, Axes]) -> dict[str, Sharding]:
        """A sharding for each leaf of a batch.

        Raises:
            LayoutError: The rows don't divide over the data axes.
        """
        return {
            name: self.sharding(*self._spec(axes[name], leaf.shape, self.rules.compute, f"batch leaf {name!r}"))
            for name, leaf in batch.items()
        }

    def check_supported(self, supported: frozenset[str], who: str) -> None:
        """Raise a LayoutError if the mesh has an axis above size 1 that `who` does not compute correctly on."""
        for axis, size in self.sizes.items():
            if size > 1 and axis not in supported:
                known = ", ".join(a for a in MESH_AXES if a in supported)
                raise LayoutError(f"mesh.{axis}={size}: {who} supports the mesh axes {known}; set mesh.{axis} to 1")

    @contextlib.contextmanager
    def activate(self) -> Iterator[None]:
        """Trace and run what is inside on this mesh."""
        mesh = contextlib.nullcontext() if self.devices.size == 1 else jax.set_mesh(self.devices)
        with mesh, use_layout(self):
            yield
