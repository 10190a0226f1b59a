"""`Placement`: a mesh of devices with its sharding rules, which determines each array's sharding."""

import contextlib
import dataclasses
import math
from collections.abc import Iterator, Mapping
from typing import Any

import jax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec, Sharding, SingleDeviceSharding

from ..core.errors import LayoutError
from ..core.layout.layout import use_layout
from ..core.layout.target import Target, device_target
from ..core.layout.zero_stage import ZeroStage
from ..core.params.axes import pair_axes
from ..core.params.logical import Role, axis_for_role
from ..core.protocols import Axes, RowOrder
from ..job.cpu_scheduling import processes_on_these_cores, use_batch_policy_while_alone
from ..job.join import num_local_processes
from .devices import device_grid
from .legality import MeshRequirements, resolve_mesh
from .rules import MESH_AXES, MeshAxes, Rules, assign, zero_stage
from .topology import MeshShape


@dataclasses.dataclass(frozen=True)
class Placement:
    """A mesh of devices and the rules that map logical axes to it (implements `core.Layout`).

    On a single device, programs are traced without a mesh and arrays are unsharded.

    Attributes:
        devices: The mesh. All axes are named, also those of size 1, so that a spec means the same on every
            mesh.
        rules: Sharding of each logical axis.
        row_order: Which positions of a row the devices of the context axis hold.
        local_axes: Mesh axes along which each device works independently; traced code sees them at size 1.
        alike: Mesh axes along which devices compute the same; traced code sees them at size 1, while
            parameters stay sharded over them.
    """

    devices: Mesh
    rules: Rules = dataclasses.field(default_factory=Rules)
    row_order: RowOrder = "zigzag"
    local_axes: MeshAxes = ()
    alike: MeshAxes = ()

    @classmethod
    def create(
        cls,
        shape: MeshShape | None = None,
        rules: Rules | None = None,
        devices: Any = None,
        needs: MeshRequirements | None = None,
    ) -> "Placement":
        """Arrange devices as a mesh; all of JAX's devices by default.

        Args:
            needs: Requirements on the meshes that an error suggests.

        Raises:
            LayoutError: The shape does not match the number of devices, or leaves a process of the job
                without devices.
        """
        devices = jax.devices() if devices is None else list(devices)
        sizes = resolve_mesh(shape or MeshShape(), len(devices), needs, rules)
        chosen = devices[: math.prod(sizes.values())]
        idle = {device.process_index for device in devices} - {device.process_index for device in chosen}
        if idle:
            shape_said = ", ".join(f"{axis}={size}" for axis, size in sizes.items() if size > 1) or "of one device"
            raise LayoutError(
                f"the mesh {shape_said} takes {len(chosen)} of {len(devices)} devices, and leaves none to process "
                f"{', '.join(map(str, sorted(idle)))} of the job; set an axis to -1 for all that are left, or start fewer "
                f"processes"
            )
        grid = device_grid(chosen, sizes)
        if jax.process_count() > 1 and not device_target(chosen[0]).traits.own_memory:
            use_batch_policy_while_alone(processes_on_these_cores(num_local_processes()))
        return cls(Mesh(grid, MESH_AXES, axis_types=(AxisType.Auto,) * len(MESH_AXES)), rules or Rules())

    @property
    def mesh(self) -> Mesh:
        return self.devices

    @property
    def target(self) -> Target:
        return device_target(self.devices.devices.flat[0], self.devices.size)

    @property
    def sizes(self) -> Mapping[str, int]:
        """Mesh axis to size."""
        return {**self._stored_sizes, **dict.fromkeys(self.alike, 1)}

    @property
    def _stored_sizes(self) -> Mapping[str, int]:
        shape = dict(zip(MESH_AXES, self.devices.devices.shape))
        return {**shape, **dict.fromkeys(self.local_axes, 1)}

    @property
    def zero(self) -> ZeroStage:
        return zero_stage(self.rules, self.sizes)

    @property
    def overlap(self) -> bool:
        return self.rules.overlap

    @property
    def weight_gather_dtype(self) -> str:
        return self.rules.weight_gather_dtype

    def with_local_axis(self, axis: str) -> "Placement":
        """Return the same mesh as seen by one device along `axis`, which works independently."""
        return dataclasses.replace(self, local_axes=(*self.local_axes, axis))

    def without_axis(self, axis: str) -> "Placement":
        return dataclasses.replace(self, rules=self.rules.without_axis(axis))

    def with_whole_rows(self) -> "Placement":
        dims = self.compute((axis_for_role(Role.STREAM),)) + self.compute((axis_for_role(Role.POSITIONS),))
        return dataclasses.replace(
            self, alike=tuple(dict.fromkeys((*self.alike, *(axis for dim in dims for axis in dim))))
        )

    def for_generation(self) -> "Placement":
        """Return the same mesh for generation; see `Rules.for_generation`."""
        return dataclasses.replace(self, rules=self.rules.for_generation())

    def with_rows_over(self, axis: str) -> "Placement":
        return dataclasses.replace(self, rules=self.rules.with_rows_over(axis))

    def compute(self, axes: Axes) -> tuple[MeshAxes, ...]:
        return assign(axes, None, self.rules.compute, self.sizes)

    def storage(self, axes: Axes, shape: tuple[int, ...] | None = None) -> tuple[MeshAxes, ...]:
        return assign(axes, shape, self.rules.storage, self._stored_sizes)

    def storage_shardings(self, tree: Any, axes: Any) -> Any:
        """Return a sharding for each (abstract) parameter or state leaf.

        Raises:
            LayoutError: A dimension does not divide; the message names the parameter.
        """
        shardings = [
            self.sharding(*partition_entries(assign(leaf_axes, leaf.shape, self.rules.storage, self.sizes, name)))
            for name, leaf, leaf_axes in pair_axes(tree, axes)
        ]
        return jax.tree.structure(tree).unflatten(shardings)

    def sharding(self, *spec: Any) -> Sharding:
        """Return the sharding of a spec on this mesh; replicated without arguments."""
        if self.devices.size == 1:
            return SingleDeviceSharding(self.devices.devices.flat[0])
        return NamedSharding(self.devices, PartitionSpec(*spec))

    def batch_shardings(self, batch: Mapping[str, Any], axes: Mapping[str, Axes]) -> dict[str, Sharding]:
        """Return a sharding for each leaf of a batch.

        Raises:
            LayoutError: The rows or positions do not divide over their mesh axes.
        """
        return {
            name: self.sharding(
                *partition_entries(
                    assign(axes[name], leaf.shape, self.rules.compute, self.sizes, f"batch leaf {name!r}")
                )
            )
            for name, leaf in batch.items()
        }

    @contextlib.contextmanager
    def activate(self) -> Iterator[None]:
        """Trace code inside for this mesh."""
        with use_layout(self):
            yield


def partition_entries(dims: tuple[MeshAxes, ...]) -> tuple[Any, ...]:
    """Return the entries of a PartitionSpec, given the mesh axes of each dimension.

    >>> partition_entries((("fsdp",), (), ("fsdp", "expert")))
    ('fsdp', None, ('fsdp', 'expert'))
    """
    return tuple(None if not axes else axes[0] if len(axes) == 1 else axes for axes in dims)
