"""Sharding rules, two small dictionaries, and their application to arrays. Plain Python, so that a supervisor
can check a layout without jax.

`storage` shards parameters between uses, `compute` shards all arrays in computation. Each maps a logical axis
to a tuple of mesh axes. DDP, FSDP, HSDP, tensor, sequence and expert parallelism are entries in these two; no
model depends on them. The defaults are those of the registered axes (`core/params/logical.py`).
"""

import copy
import dataclasses
import math
from collections.abc import Mapping
from typing import Literal

from ..core.errors import LayoutError, suggest_name
from ..core.layout.zero_stage import ZeroStage
from ..core.params.logical import (
    COMPUTE,
    LOCAL_AXES,
    MESH_AXES,
    STORAGE,
    DivisibilityPolicy,
    MeshAxes,
    Role,
    axis_for_role,
    lookup_axis,
)
from ..core.params.logical import LOGICAL_AXES as LOGICAL_AXES
from ..core.validation import Validated

Zero = Literal["auto", "1", "2", "3"]


def zero_stage(rules: "Rules", sizes: Mapping[str, int]) -> ZeroStage:
    """Return the ZeRO stage of a step on a mesh: "auto" is 3, or 1 in a pipeline."""
    if rules.zero != "auto":
        return ZeroStage(rules.zero)
    return ZeroStage.ONE if sizes["stage"] > 1 else ZeroStage.THREE


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rules(Validated):
    """Logical axis to mesh axes; a logical axis that is not listed is replicated.

    Attributes:
        storage: For parameters, their gradients and optimizer state.
        compute: For activations, and for parameters while they are used.
        zero: ZeRO stage: which parts of a step are sharded over fsdp, in addition to stored parameters and
            state. 3: weights are gathered at each use, and gradients reduce-scattered in each micro-batch. 2:
            weights are gathered once per step and kept. 1: gradients are kept unsharded too, and
            reduce-scattered once per step. auto: 3, but 1 in a pipeline, in which a stage uses a weight once
            per micro-batch.
        overlap: True to decompose the gathers and scatters of tensor parallelism into rings of sends that
            overlap with parts of their matmuls: the same bytes, hidden if the backend sends while it
            multiplies.
        weight_gather_dtype: Format in which weights are gathered. same: in the compute dtype. int8, float8: as codes
            with a scale per block of 256, decoded after the gather; stored weights keep their dtype, and
            gradients are those of the rounded weights.
    """

    storage: Mapping[str, MeshAxes] = dataclasses.field(default_factory=lambda: dict(STORAGE))
    compute: Mapping[str, MeshAxes] = dataclasses.field(default_factory=lambda: dict(COMPUTE))
    zero: Zero = "auto"
    overlap: bool = False
    weight_gather_dtype: Literal["same", "int8", "float8"] = "same"

    def __post_init__(self) -> None:
        self._check_axes()

    def _check_axes(self) -> None:
        for which, rules in (("storage", self.storage), ("compute", self.compute)):
            for logical, mesh_axes in rules.items():
                if len(set(mesh_axes)) < len(mesh_axes):
                    raise LayoutError(
                        f"rules.{which}: {logical} -> {mesh_axes} names a mesh axis twice; name each once"
                    )
                for axis in mesh_axes:
                    if axis not in MESH_AXES:
                        raise LayoutError(
                            f"rules.{which}: {logical} -> {axis!r} is not a mesh axis; {suggest_name(axis, MESH_AXES)}"
                        )
        for logical, mesh_axes in self.storage.items():
            used = self.compute.get(logical, ())
            if mesh_axes and tuple(mesh_axes[: len(used)]) != tuple(used):
                raise LayoutError(
                    f"rules.storage: {logical} -> {mesh_axes} must begin with its compute axes, {tuple(used)}: "
                    f"a weight is gathered over the others before use"
                )

    def __hash__(self) -> int:
        rules = (tuple(sorted(each.items())) for each in (self.storage, self.compute))
        return hash((*rules, self.zero, self.overlap, self.weight_gather_dtype))

    def without_axis(self, axis: str) -> "Rules":
        """Return these rules with nothing sharded along one mesh axis."""
        storage, compute = (
            {logical: tuple(a for a in axes if a != axis) for logical, axes in rules.items()}
            for rules in (self.storage, self.compute)
        )
        return dataclasses.replace(self, storage=storage, compute=compute)

    def with_rows_over(self, axis: str) -> "Rules":
        """Return these rules with rows also sharded over another mesh axis."""
        rows = axis_for_role(Role.ROWS)
        return dataclasses.replace(self, compute={**self.compute, rows: (*self.compute.get(rows, ()), axis)})

    def for_generation(self) -> "Rules":
        """Return these rules for generation: rows over all mesh axes along which devices compute with the same weights,
        including those of positions and of a pipeline's stages, and weights stored as they are computed with.
        """
        rows, *unsplit = (axis_for_role(role) for role in (Role.ROWS, Role.POSITIONS, Role.STREAM, Role.LAYERS))
        parallel = {axis for logical, axes in self.compute.items() if lookup_axis(logical).parallel for axis in axes}
        batch = self.compute.get(rows, ())
        others = tuple(axis for axis in MESH_AXES if axis not in parallel and axis not in batch)
        compute = {**self.compute, **dict.fromkeys(unsplit, ()), rows: (*batch, *others)}
        return dataclasses.replace(self, storage=compute, compute=compute, weight_gather_dtype="same", overlap=False)

    def without_positions(self) -> "Rules":
        """Return these rules for batches without positions: devices along an axis that would shard positions
        compute alike.
        """
        return dataclasses.replace(self, compute={**self.compute, axis_for_role(Role.POSITIONS): ()})

    def with_whole_residual(self) -> "Rules":
        """Return these rules for a model with a residual stream that is sharded no further than the positions
        of its rows.
        """
        whole = self.compute.get(axis_for_role(Role.POSITIONS), ())
        return dataclasses.replace(self, compute={**self.compute, axis_for_role(Role.STREAM): whole})

    def fit(self, sizes: Mapping[str, int], mesh: Mapping[str, int], *, layers_rest_on_stages: bool = True) -> "Rules":
        """Return these rules for one model, with axes that do not divide sharded differently where that is
        legal.

        Each axis defines what happens if the mesh does not divide it (`DivisibilityPolicy`). Layers that do not form
        equal, adjacent stages are stored sharded along their width, and sent to their stages once per step.

        Args:
            sizes: The model's logical axes.
            mesh: Mesh axis to size.
            layers_rest_on_stages: True if each stage stores its layers.
        """
        storage, compute = dict(self.storage), dict(self.compute)
        for name, size in sizes.items():
            rests, undivided = storage.get(name, ()), lookup_axis(name).undivided
            if undivided is DivisibilityPolicy.REPLICATED and not _divides(mesh, compute.get(name, ()), size):
                storage[name] = compute[name] = ()
            elif undivided is DivisibilityPolicy.OFF_STAGES and not _divides(mesh, rests, size):
                storage[name] = tuple(axis for axis in rests if axis != "stage")
            elif undivided is DivisibilityPolicy.FEWER:
                while not _divides(mesh, rests, size):
                    rests = storage[name] = rests[:-1]
        if not layers_rest_on_stages:
            storage[axis_for_role(Role.LAYERS)] = ()
        # Not by `replace`, which would validate every field again: a search fits thousands of layouts.
        fitted = copy.copy(self)
        object.__setattr__(fitted, "storage", storage)
        object.__setattr__(fitted, "compute", compute)
        fitted._check_axes()
        return fitted


def assign(
    axes: tuple[str | None, ...],
    shape: tuple[int, ...] | None,
    rules: Mapping[str, MeshAxes],
    mesh: Mapping[str, int],
    name: str = "array",
) -> tuple[MeshAxes, ...]:
    """Return the mesh axes that shard each dimension.

    Args:
        axes: Logical axis of each dimension.
        shape: Sizes, to check that they divide; None to skip the check (elective axes are then assumed to
            divide).
        rules: Logical axis to mesh axes.
        mesh: Mesh axis to size. Axes of size 1 are never assigned.
        name: Name of the array in an error.

    Raises:
        LayoutError: A dimension does not divide, or two dimensions claim one mesh axis; the message gives the
            sizes and what would fit.

    >>> assign(("embed", "ffn"), (8, 32), STORAGE, {"fsdp": 4, "tensor": 2})
    (('fsdp',), ('tensor',))
    """
    used: dict[str, str] = {}
    result: list[MeshAxes] = []
    for i, logical in enumerate(axes):
        rule = LOCAL_AXES.get(logical or "") or rules.get(logical or "", ())
        split_axes = [axis for axis in rule if mesh.get(axis, 1) > 1]
        # A mesh axis that another dimension already uses is dropped from a longer rule; if it is the only one
        # of a rule, it is an error.
        free = tuple(axis for axis in split_axes if axis not in used)
        clash = [axis for axis in split_axes if axis in used]
        if clash and len(rule) == 1 and used[clash[0]] != logical:
            raise LayoutError(
                f"{name}: its dimensions {used[clash[0]]!r} and {logical!r} are both mapped to mesh axis {clash[0]!r}; "
                f"map one of them elsewhere in the rules"
            )
        if shape is None or not free:
            pass
        elif lookup_axis(logical).undivided is DivisibilityPolicy.ELECTIVE:
            free = _dividing(shape[i], free, mesh)
        else:
            _check_divides(name, logical or "", shape[i], free, mesh)
        used.update(dict.fromkeys(free, logical or ""))
        result.append(free)
    return tuple(result)


def _divides(mesh: Mapping[str, int], axes: MeshAxes, size: int) -> bool:
    return size % math.prod(mesh.get(axis, 1) for axis in axes) == 0


def _dividing(size: int, axes: MeshAxes, mesh: Mapping[str, int]) -> MeshAxes:
    """Return those of `axes`, taken in order, that divide the remaining `size`."""
    chosen: list[str] = []
    for axis in axes:
        if size % mesh[axis] == 0:
            chosen.append(axis)
            size //= mesh[axis]
    return tuple(chosen)


def _check_divides(name: str, logical: str, size: int, axes: MeshAxes, mesh: Mapping[str, int]) -> None:
    ways = math.prod(mesh[axis] for axis in axes)
    if size % ways == 0:
        return
    product = "·".join(f"{axis}={mesh[axis]}" for axis in axes)
    fits = [str(n) for n in divisors(size) if n <= max(64, ways)]
    where = axes[0] if len(axes) == 1 else "·".join(axes)
    raise LayoutError(
        f"{name}: {logical}={size} is not divisible by {product}; use {where} in {{{', '.join(fits)}}} or another {logical}"
    )


def divisors(n: int) -> list[int]:
    """Return all divisors of `n` in ascending order.

    >>> divisors(12)
    [1, 2, 3, 4, 6, 12]
    """
    small = [d for d in range(1, math.isqrt(n) + 1) if n % d == 0]
    return sorted({*small, *(n // d for d in small)})
