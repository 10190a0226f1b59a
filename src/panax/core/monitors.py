"""`MetricMonitor`: monitoring of a task's array metrics from one record of a run to the next."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol, runtime_checkable

import numpy as np
from jaxtyping import Float


class HeatMap(NamedTuple):
    """Values to show as a heat map.

    Attributes:
        values: As multiples of the mean of their row.
        rows: The number of each row.
        row: Name of a row.
        column: Name of a column; columns are counted from 0.
    """

    values: Float[np.ndarray, "row column"]
    rows: tuple[int, ...]
    row: str
    column: str


class MonitorReport(NamedTuple):
    """Findings of a monitor since the last record.

    Attributes:
        scalars: By full name.
        heat_maps: By full name.
        warnings: One sentence each.
    """

    scalars: Mapping[str, float] = {}
    heat_maps: Mapping[str, HeatMap] = {}
    warnings: Sequence[str] = ()


@runtime_checkable
class MetricMonitor(Protocol):
    """Receives the metrics of each step, and summarizes them once per record."""

    def add(self, metrics: Mapping[str, Any]) -> None:
        """Receive one step's metrics by name, numbers and arrays, including those that this monitor does not follow."""
        ...

    def take(self) -> MonitorReport:
        """Return the findings since the last call."""
        ...


class JointMonitor:
    """Several monitors as one."""

    def __init__(self, monitors: Sequence[MetricMonitor]) -> None:
        self._monitors = tuple(monitors)

    def add(self, metrics: Mapping[str, Any]) -> None:
        for monitor in self._monitors:
            monitor.add(metrics)

    def take(self) -> MonitorReport:
        reports = [monitor.take() for monitor in self._monitors]
        return MonitorReport(
            {name: value for report in reports for name, value in report.scalars.items()},
            {name: value for report in reports for name, value in report.heat_maps.items()},
            [warning for report in reports for warning in report.warnings],
        )
