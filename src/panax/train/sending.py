"""Batches on their way to the devices: which rows of a global batch a process holds, and arrays made of only those."""

import dataclasses
import difflib
from collections.abc import Collection, Mapping
from typing import Any, Protocol, runtime_checkable

import jax
import numpy as np
import numpy.typing as npt
from jax.sharding import Sharding

from ..core import Axes, Task
from ..core.errors import DataError
from ..core.leaf_ranges import NUMBER


@dataclasses.dataclass(frozen=True, eq=False)
class HeldRows:
    """The rows of a global batch that some devices hold between them.

    Attributes:
        rows: Their places in the batch, rising; not always neighbours.
        batch_size: Rows of the whole batch.
    """

    rows: npt.NDArray[np.int64]
    batch_size: int


@runtime_checkable
class Sender(Protocol):
    """Puts batches on devices: what a feed asks of a step."""

    @property
    def rows_divide(self) -> int:
        """What the rows of a batch are filled up to a multiple of; 1 where they are taken as they come."""
        ...

    def held_rows(self, batch_size: int) -> HeldRows | None:
        """Which rows of a global batch this process's devices hold; None where it holds all of them."""
        ...

    def put(
        self, batch: Mapping[str, Any], held: HeldRows | None = None, *, owned: bool = False
    ) -> dict[str, jax.Array]:
        """Send a batch, or only the rows `held` of it; returns at once. It is copied first, unless its memory is `owned`."""
        ...


def check_leaves(task: Task, names: Collection[str]) -> None:
    """Check that a batch has the leaves that a task needs.

    Raises:
        DataError: One is missing, or has a name that this task does not read though it seems to be meant for it.
    """
    known = {*task.required_leaves, *task.batch_axes, *task.leaf_ranges, NUMBER}
    missing = sorted(task.required_leaves - set(names))
    strange = sorted(set(names) - known)
    absent = sorted(known - set(names))
    likely = {own: name for own in absent if (name := _meant_as(own, strange, task.other_names)) is not None}
    if not missing and not (task.required_leaves and likely):
        return
    kind = type(task).__name__
    optional = sorted(known - task.required_leaves - {NUMBER})
    takes = ", ".join(sorted(task.required_leaves)) + (
        f" and, if there is one, {', '.join(optional)}" if optional else ""
    )
    named = {
        own: likely.get(own, own) for own in sorted({*task.required_leaves, *likely}) if own in likely or own in names
    }
    line = ", ".join(f'"{own}": batch["{name}"]' for own, name in named.items())
    how = f"; write {{{line}}}" if likely else ""
    what = f"lacks {', '.join(missing)}" if missing else f"has {', '.join(likely.values())}, which {kind} does not read"
    raise DataError(f"the batch has the leaves {', '.join(sorted(names))}, and {what}; {kind} takes {takes}{how}")


def _meant_as(own: str, strange: Collection[str], other_names: Mapping[str, tuple[str, ...]]) -> str | None:
    """The unknown leaf that seems to be meant for `own`."""
    for name in other_names.get(own, ()):
        if name in strange:
            return name
    close = difflib.get_close_matches(own, strange, n=1, cutoff=0.8)
    return close[0] if close else None


def check_sizes(shapes: Mapping[str, tuple[int, ...]], axes: Mapping[str, Axes]) -> None:
    """Check that leaves agree about the size of each logical axis.

    Raises:
        DataError: They don't, or one has another number of dimensions than its axes.
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


def held_by(devices: Collection[Any], sharding: Sharding, batch_size: int) -> HeldRows:
    """What `devices` hold of `batch_size` rows sharded so.

    Args:
        sharding: Of an array that has the rows as its only dimension.
    """
    held = np.zeros(batch_size, np.bool_)
    for device, (rows,) in sharding.devices_indices_map((batch_size,)).items():
        if device in devices:
            held[rows] = True
    return HeldRows(np.flatnonzero(held), batch_size)


def global_array(leaf: np.ndarray, held: HeldRows, sharding: Sharding) -> jax.Array:
    """The global array of which this process has made the rows that its devices hold; none of the others is needed."""

    def shard(index: Any) -> np.ndarray:
        begin, end, _ = index[0].indices(held.batch_size)
        first = int(np.searchsorted(held.rows, begin))
        return leaf[(slice(first, first + end - begin), *index[1:])]

    return jax.make_array_from_callback((held.batch_size, *leaf.shape[1:]), sharding, shard)
