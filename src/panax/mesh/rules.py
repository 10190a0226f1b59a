"""The two small dictionaries, and whether a layout is legal. Plain Python: a supervisor checks a layout without jax.

`storage` says where a parameter rests between its uses, `compute` where everything lies while it is computed with. Each
maps a logical axis to a mesh axis, to a tuple of them, or to None. DDP, FSDP, HSDP, tensor, sequence and expert parallelism
are entries in these two; no model knows of them. The defaults are those of the registered axes (`core/logical.py`).
"""

import copy
import dataclasses
import math
from collections.abc import Mapping
from typing import Literal

from ..core.errors import LayoutError, nearest
from ..core.logical import COMPUTE, EACH, MESH_AXES, STORAGE, MeshAxes, Role, Undivided, axis_of, traits_of
from ..core.logical import LOGICAL_AXES as LOGICAL_AXES
from ..core.validated import Validated

Zero = Literal["auto", "1", "2", "3"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rules(Validated):
    """Logical axis to mesh axes; a logical axis that is not named is replicated.

    Attributes:
        storage: For parameters, their gradients and optimizer moments.
        compute: For activations, and for parameters where they are used.
        zero: What of a step is sharded over fsdp besides what rests between steps. 3: weights are gathered at each use, gradients
            reduce-scattered in each micro-batch. 2: weights are gathered once a step and kept. 1: gradients too are kept whole,
            and reduce-scattered once a step. auto: 3, and 1 in a pipeline, whose stages use a weight once per micro-batch.
        overlap: Cut the gathers and scatters of tensor parallelism into rings of sends beside parts of their products: the same
            bytes, hidden where the backend sends while it multiplies.
        gathered_as: What weights are gathered as. same: in the type that they are computed in. int8, float8: as codes with a
            scale for each 256, decoded where they arrive; what rests keeps its type, and gradients are those of the rounded
            weights.
    """

    storage: Mapping[str, MeshAxes] = dataclasses.field(default_factory=lambda: dict(STORAGE))
    compute: Mapping[str, MeshAxes] = dataclasses.field(default_factory=lambda: dict(COMPUTE))
    zero: Zero = "auto"
    overlap: bool = False
    gathered_as: Literal["same", "int8", "float8"] = "same"

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
                            f"rules.{which}: {logical} -> {axis!r} is not a mesh axis; {nearest(axis, MESH_AXES)}"
                        )
        for logical, mesh_axes in self.storage.items():
            used = self.compute.get(logical, ())
            if mesh_axes and tuple(mesh_axes[: len(used)]) != tuple(used):
                raise LayoutError(
                    f"rules.storage: {logical} -> {mesh_axes} must begin with the axes that it is computed over, {tuple(used)}: "
                    f"a weight is gathered over the others where it is used"
                )

    def without(self, axis: str) -> "Rules":
        """These rules with nothing laid along one mesh axis."""
        storage, compute = (
            {logical: tuple(a for a in axes if a != axis) for logical, axes in rules.items()}
            for rules in (self.storage, self.compute)
        )
        return dataclasses.replace(self, storage=storage, compute=compute)

    def with_rows_over(self, axis: str) -> "Rules":
        """These rules with rows split over one more mesh axis."""
        rows = axis_of(Role.ROWS)
        return dataclasses.replace(self, compute={**self.compute, rows: (*self.compute.get(rows, ()), axis)})

    def without_positions(self) -> "Rules":
        """These rules for batches whose rows have no positions: an axis that would split these computes alike on its devices."""
        return dataclasses.replace(self, compute={**self.compute, axis_of(Role.POSITIONS): ()})

    def with_whole_residual(self) -> "Rules":
        """These rules for a model whose residual stream is split no further than its rows' positions are."""
        whole = self.compute.get(axis_of(Role.POSITIONS), ())
        return dataclasses.replace(self, compute={**self.compute, axis_of(Role.STREAM): whole})

    def fitted(
        self, sizes: Mapping[str, int], mesh: Mapping[str, int], *, layers_rest_on_stages: bool = True
    ) -> "Rules":
        """These rules for one model: what they can't split is laid out otherwise, where that is legal.

        Each axis says what becomes of it where the mesh does not divide it (`Undivided`). Layers that don't fall into equal,
        adjacent stages rest split along their width, and travel to their stages once a step.

        Args:
            sizes: The model's logical axes.
        """
        storage, compute = dict(self.storage), dict(self.compute)
        for name, size in sizes.items():
            rests, undivided = storage.get(name, ()), traits_of(name).undivided
            if undivided is Undivided.REPLICATED and not _divides(mesh, compute.get(name, ()), size):
                storage[name] = compute[name] = ()
            elif undivided is Undivided.OFF_STAGES and not _divides(mesh, rests, size):
                storage[name] = tuple(axis for axis in rests if axis != "stage")
            elif undivided is Undivided.FEWER:
                while not _divides(mesh, rests, size):
                    rests = storage[name] = rests[:-1]
        if not layers_rest_on_stages:
            storage[axis_of(Role.LAYERS)] = ()
        # Not by `replace`, which would compare every word with its annotation again: thousands of layouts are fitted in a search.
        made = copy.copy(self)
        object.__setattr__(made, "storage", storage)
        object.__setattr__(made, "compute", compute)
        made._check_axes()
        return made


def assign(
    axes: tuple[str | None, ...],
    shape: tuple[int, ...] | None,
    rules: Mapping[str, MeshAxes],
    mesh: Mapping[str, int],
    name: str = "array",
) -> tuple[MeshAxes, ...]:
    """The mesh axes that each dimension is split over.

    Args:
        axes: The logical axis of each dimension.
        shape: The sizes, to check that they divide; None to leave that out (elective axes are then taken to divide).
        mesh: Mesh axis to size. Axes of size 1 are never assigned.
        name: What to call the array in an error.

    Raises:
        LayoutError: A dimension does not divide, or two dimensions claim one mesh axis; with the numbers and what would fit.

    >>> assign(("embed", "ffn"), (8, 32), STORAGE, {"fsdp": 4, "tensor": 2})
    (('fsdp',), ('tensor',))
    """
    used: dict[str, str] = {}
    result: list[MeshAxes] = []
    for i, logical in enumerate(axes):
        rule = EACH.get(logical or "") or rules.get(logical or "", ())
        wanted = [axis for axis in rule if mesh.get(axis, 1) > 1]
        # An axis of a longer rule that another dimension took already is dropped; a rule's only axis is a collision.
        free = tuple(axis for axis in wanted if axis not in used)
        taken = [axis for axis in wanted if axis in used]
        if taken and len(rule) == 1 and used[taken[0]] != logical:
            raise LayoutError(
                f"{name}: its dimensions {used[taken[0]]!r} and {logical!r} are both mapped to mesh axis {taken[0]!r}; "
                f"map one of them elsewhere in the rules"
            )
        if shape is None or not free:
            pass
        elif traits_of(logical).undivided is Undivided.ELECTIVE:
            free = _dividing(shape[i], free, mesh)
        else:
            _check_divides(name, logical or "", shape[i], free, mesh)
        used.update(dict.fromkeys(free, logical or ""))
        result.append(free)
    return tuple(result)


def _divides(mesh: Mapping[str, int], axes: MeshAxes, size: int) -> bool:
    return size % math.prod(mesh.get(axis, 1) for axis in axes) == 0


def _dividing(size: int, axes: MeshAxes, mesh: Mapping[str, int]) -> MeshAxes:
    """Those of `axes`, taken one after the other, that divide what is left of `size`."""
    found: list[str] = []
    for axis in axes:
        if size % mesh[axis] == 0:
            found.append(axis)
            size //= mesh[axis]
    return tuple(found)


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
    """All divisors of `n`, ascending.

    >>> divisors(12)
    [1, 2, 3, 4, 6, 12]
    """
    small = [d for d in range(1, math.isqrt(n) + 1) if n % d == 0]
    return sorted({*small, *(n // d for d in small)})
