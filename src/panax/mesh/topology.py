"""Number of devices along each mesh axis. Plain Python."""

import dataclasses
import math
from collections.abc import Mapping

from ..core.errors import LayoutError
from ..core.validation import Validated
from .rules import MESH_AXES


@dataclasses.dataclass(frozen=True, kw_only=True)
class MeshShape(Validated):
    """Sizes of the mesh axes, slowest network first; at most one may be -1 for all remaining devices.

    Attributes:
        replica: Data parallelism with full replicas (DDP), or across groups that shard internally (HSDP).
        stage: Pipeline stages.
        fsdp: Data parallelism with sharded parameters, gradients and optimizer state (ZeRO-3).
        expert: Expert parallelism; shards the batch too.
        context: Shards the sequence.
        tensor: Shards heads and feed-forward width.
        auto: True to choose the sizes for the model, the batch and the devices, with micro-batches and
            `remat`: see `plan.auto`.
    """

    replica: int = 1
    stage: int = 1
    fsdp: int = -1
    expert: int = 1
    context: int = 1
    tensor: int = 1
    auto: bool = False

    @classmethod
    def hint_for(cls, value: object) -> str | None:
        """Return the code to write if another type is passed in place of a mesh; None if unknown."""
        if isinstance(value, Mapping):
            return f"write MeshShape({', '.join(f'{name}={size}' for name, size in value.items())})"
        return None

    def __post_init__(self) -> None:
        given = [
            f"mesh.{field.name}" for field in dataclasses.fields(self) if getattr(self, field.name) != field.default
        ]
        if self.auto and len(given) > 1:
            raise LayoutError(f"mesh.auto chooses all sizes, and {given[0]} is set too; remove one of them")

    def resolve(self, num_devices: int) -> dict[str, int]:
        """Return mesh axis to size, with -1 replaced.

        Raises:
            LayoutError: The sizes need more than `num_devices`, or do not divide it; the message names the
                fix.

        >>> MeshShape(replica=2).resolve(8)["fsdp"]
        4
        """
        if self.auto:
            raise LayoutError(
                "mesh.auto is chosen for a task and its batch, by a run or `panax inspect`; elsewhere set the sizes, "
                "for example mesh.fsdp"
            )
        sizes = {axis: getattr(self, axis) for axis in MESH_AXES}
        bad = [axis for axis, size in sizes.items() if size < 1 and size != -1]
        if bad:
            raise LayoutError(f"mesh.{bad[0]}={sizes[bad[0]]}; expected a positive number, or -1 for all devices left")
        open_axes = [axis for axis, size in sizes.items() if size == -1]
        if len(open_axes) > 1:
            raise LayoutError(f"mesh.{open_axes[0]} and mesh.{open_axes[1]} are both -1; set one of them to a number")
        fixed = math.prod(size for size in sizes.values() if size != -1)
        described = "·".join(f"{axis}={size}" for axis, size in sizes.items() if size > 1) or "1"
        if open_axes:
            if num_devices % fixed or num_devices < fixed:
                raise LayoutError(
                    f"the mesh {described} needs a multiple of {fixed} devices, there are {num_devices}; "
                    f"make the product of the other axes a divisor of {num_devices}"
                )
            sizes[open_axes[0]] = num_devices // fixed
        elif fixed > num_devices:
            raise LayoutError(
                f"the mesh {described} has {fixed} devices, there are {num_devices}; shrink an axis, or set one to -1 for all "
                f"that are left"
            )
        return sizes


def data_parallel_size(mesh: Mapping[str, int]) -> int:
    """Return the number of parts into which a mesh splits the rows of a batch."""
    return math.prod(mesh.get(axis, 1) for axis in ("replica", "fsdp", "expert"))
