"""`MetricMonitor`: follows those of a task's metrics that are arrays, from one record of a run to the next."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol, runtime_checkable

import numpy as np
from jaxtyping import Float


class HeatMap(NamedTuple):
    """Figures that are shown as a heat map.

    Attributes:
        values: As multiples of the mean of their row.
        rows: The number of each row.
        row: What a row is called.
        column: What a column is called; columns are counted from 0.
    """

    values: Float[np.ndarray, "row column"]
    rows: tuple[int, ...]
    row: str
    column: str


class Watched(NamedTuple):
    """What a watch found since the last record.

    Attributes:
        scalars: By their full names.
        heat_maps: By theirs.
        warnings: A sentence each.
    """

    scalars: Mapping[str, float] = {}
    heat_maps: Mapping[str, HeatMap] = {}
    warnings: Sequence[str] = ()


@runtime_checkable
class MetricMonitor(Protocol):
    """Takes the array metrics of each step, and gives figures of all of them once a record."""

    def add(self, metrics: Mapping[str, Any]) -> None:
        """Take one step's metrics that are arrays, by name: those that are not of this watch too."""
        ...

    def take(self) -> Watched:
        """What there is to say of the steps since the last call."""
        ...
