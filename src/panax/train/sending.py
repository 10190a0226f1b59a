"""Batches on their way to the devices: which rows of a global batch a process holds, and arrays made of only those."""

import dataclasses
from collections.abc import Collection, Mapping
from typing import Any, Protocol, runtime_checkable

import jax
import numpy as np
import numpy.typing as npt
from jax.sharding import Sharding

from ..core.errors import DataError


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

    def put(self, batch: Mapping[str, Any], held: HeldRows | None = None) -> dict[str, jax.Array]:
        """Send a batch, or only the rows `held` of it; returns at once."""
        ...


def check_ranges(batch: Mapping[str, np.ndarray], ranges: Mapping[str, range]) -> None:
    """See that integer leaves hold what the task knows; a label too large would be trained on as NaN.

    Raises:
        DataError: One holds another number.
    """
    for name, allowed in ranges.items():
        leaf = batch.get(name)
        if leaf is None or leaf.size == 0 or not np.issubdtype(leaf.dtype, np.integer):
            continue
        least, most = int(leaf.min()), int(leaf.max())
        if least < allowed.start or most >= allowed.stop:
            raise DataError(
                f"the batch's leaf {name!r} holds {most if most >= allowed.stop else least}; this task takes {allowed.start} to "
                f"{allowed.stop - 1}: mend the data, or give the task more of them"
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
