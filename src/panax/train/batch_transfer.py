"""Transfer of batches to devices: the rows of a global batch that a process holds, and global arrays built
from only those."""

import dataclasses
import difflib
from collections.abc import Collection, Mapping
from typing import Any, Protocol, runtime_checkable

import jax
import numpy as np
import numpy.typing as npt
from jax.sharding import Sharding

from ..core import Axes, Task
from ..core.batch_checks import ROW_LEAF
from ..core.errors import DataError


@dataclasses.dataclass(frozen=True, eq=False)
class HeldRows:
    """The rows of a global batch that a set of devices holds.

    Attributes:
        rows: Indices of the rows in the batch, ascending, not necessarily contiguous.
        batch_size: Number of rows of the whole batch.
    """

    rows: npt.NDArray[np.int64]
    batch_size: int


@runtime_checkable
class Sender(Protocol):
    """The interface for putting batches on devices, as a feed requires it of a step."""

    @property
    def row_multiple(self) -> int:
        """The divisor of a batch's padded number of rows; 1 for no padding."""
        ...

    def held_rows(self, batch_size: int) -> HeldRows | None:
        """Return the rows of a global batch that this process's devices hold; None if it holds all of
        them."""
        ...

    def put(
        self, batch: Mapping[str, Any], held: HeldRows | None = None, *, owned: bool = False
    ) -> dict[str, jax.Array]:
        """Transfer a batch, or only the rows `held` of it; returns at once. The batch is copied first, unless
        its memory is `owned`."""
        ...


def check_leaves(task: Task, names: Collection[str]) -> None:
    """Check that a batch has the leaves that a task needs.

    Raises:
        DataError: A leaf is missing, or an unknown leaf appears to be a misnamed one.
    """
    known = {*task.required_leaves, *task.batch_axes, *task.leaf_ranges, ROW_LEAF}
    missing = sorted(task.required_leaves - set(names))
    strange = sorted(set(names) - known)
    absent = sorted(known - set(names))
    likely = {leaf: name for leaf in absent if (name := _find_misnamed(leaf, strange, task.leaf_aliases)) is not None}
    if not missing and not (task.required_leaves and likely):
        return
    kind = type(task).__name__
    optional = sorted(known - task.required_leaves - {ROW_LEAF})
    takes = ", ".join(sorted(task.required_leaves)) + (
        f" and, if there is one, {', '.join(optional)}" if optional else ""
    )
    named = {
        leaf: likely.get(leaf, leaf)
        for leaf in sorted({*task.required_leaves, *likely})
        if leaf in likely or leaf in names
    }
    line = ", ".join(f'"{leaf}": batch["{name}"]' for leaf, name in named.items())
    hint = f"; write {{{line}}}" if likely else ""
    hint += "".join(f"; {task.leaf_advice[leaf]}" for leaf in missing if leaf in task.leaf_advice)
    problem = (
        f"lacks {', '.join(missing)}" if missing else f"has {', '.join(likely.values())}, which {kind} does not read"
    )
    raise DataError(f"the batch has the leaves {', '.join(sorted(names))}, and {problem}; {kind} takes {takes}{hint}")


def _find_misnamed(leaf: str, strange: Collection[str], other_names: Mapping[str, tuple[str, ...]]) -> str | None:
    """Return the unknown leaf that is likely meant as `leaf`."""
    for name in other_names.get(leaf, ()):
        if name in strange:
            return name
    close = difflib.get_close_matches(leaf, strange, n=1, cutoff=0.8)
    return close[0] if close else None


def check_sizes(shapes: Mapping[str, tuple[int, ...]], axes: Mapping[str, Axes]) -> None:
    """Check that leaves have matching sizes along each logical axis.

    Raises:
        DataError: Sizes differ, or a leaf's number of dimensions does not match its axes.
    """
    sizes: dict[str, tuple[int, str]] = {}
    for name, shape in shapes.items():
        if len(axes[name]) != len(shape):
            raise DataError(
                f"the batch's leaf {name!r} has the shape {shape}; expected {len(axes[name])} dimensions, {axes[name]}"
            )
        for axis, size in zip(axes[name], shape):
            if axis is None:
                continue
            known, first = sizes.setdefault(axis, (size, name))
            if known != size:
                raise DataError(
                    f"the batch's leaf {name!r} has {size} along {axis!r}, and {first!r} has {known}; expected the same of both"
                )


def find_held_rows(devices: Collection[Any], sharding: Sharding, batch_size: int) -> HeldRows:
    """Return the rows that `devices` hold of `batch_size` rows with this sharding.

    Args:
        sharding: Sharding of an array with rows as its only dimension.
    """
    is_held = np.zeros(batch_size, np.bool_)
    for device, (rows,) in sharding.devices_indices_map((batch_size,)).items():
        if device in devices:
            is_held[rows] = True
    return HeldRows(np.flatnonzero(is_held), batch_size)


def global_array(leaf: np.ndarray, held: HeldRows, sharding: Sharding) -> jax.Array:
    """Build the global array from the rows that this process's devices hold."""

    def shard(index: Any) -> np.ndarray:
        begin, end, _ = index[0].indices(held.batch_size)
        first = int(np.searchsorted(held.rows, begin))
        return leaf[(slice(first, first + end - begin), *index[1:])]

    return jax.make_array_from_callback((held.batch_size, *leaf.shape[1:]), sharding, shard)
