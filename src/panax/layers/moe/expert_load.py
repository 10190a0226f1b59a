"""Expert load monitoring on the host: per-layer and overall metrics, and a warning if an expert starves.

Its input is the routers' metrics of all mixture layers (`router_metrics`).
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from jaxtyping import Float

from ...core.monitors import HeatMap, MonitorReport

PREFIX = "experts/"
"""Prefix of the metrics that are arrays with one row per mixture layer."""

STARVED = 0.01
"""An expert below this fraction of its layer's mean load is starving."""

PATIENCE = 3
"""Number of consecutive reports in which an expert starves before a warning: while routers settle, many
starve for a few steps."""

RECOVERED = 0.1
"""Fraction of the mean load at which a starving expert's count resets, so that it can be warned about
again."""

EXTREMES = {"load_min": np.min, "load_max": np.max, "max_violation": np.max}
"""Reduction of a metric over all layers; the mean for metrics not listed."""

Loads = Float[np.ndarray, "layer expert"]


class ExpertLoadMonitor:
    """Accumulator of router metrics between reports; a `core.watching.MetricMonitor`.

    Attributes:
        layers: The layer index of each row.
    """

    def __init__(self, layers: Sequence[int]):
        self.layers = tuple(layers)
        self._sums: dict[str, np.ndarray] = {}
        self._steps = 0
        self._starved: Any = 0

    def add(self, metrics: Mapping[str, Any]) -> None:
        """Add one step's metrics; those not reported by routers are ignored."""
        arrays = {name: value for name, value in metrics.items() if name.startswith(PREFIX) and np.ndim(value) > 0}
        found = {name: np.asarray(value, np.float64) for name, value in arrays.items()}
        if found:
            self._sums = {name: self._sums.get(name, 0.0) + value for name, value in found.items()}
            self._steps += 1

    def take(self) -> MonitorReport:
        """Return the metrics of each layer and of all layers together, each expert's load relative to its
        layer's mean, and warnings; then reset."""
        if not self._steps:
            return MonitorReport()
        means = {name: total / self._steps for name, total in self._sums.items()}
        self._sums, steps, self._steps = {}, self._steps, 0
        loads = relative_loads(means.pop(f"{PREFIX}load"))
        figures = {**load_statistics(loads), **{name.removeprefix(PREFIX): value for name, value in means.items()}}
        scalars = {
            f"{PREFIX}layer_{layer}/{name}": float(values[row])
            for name, values in figures.items()
            for row, layer in enumerate(self.layers)
        }
        scalars |= {f"{PREFIX}{name}": float(EXTREMES.get(name, np.mean)(values)) for name, values in figures.items()}
        table = HeatMap(loads, self.layers, "layer", "expert")
        return MonitorReport(scalars, {f"{PREFIX}load": table}, list(self._warnings(loads, steps)))

    def _warnings(self, loads: Loads, steps: int) -> Iterator[str]:
        starved = loads < STARVED
        self._starved = np.where(loads >= RECOVERED, 0, self._starved + starved)
        for row, of_layer in enumerate(starved & (self._starved == PATIENCE)):
            experts = np.flatnonzero(of_layer).tolist()
            if experts:
                named = ", ".join(map(str, experts[:8])) + (f" and {len(experts) - 8} more" if len(experts) > 8 else "")
                yield (
                    f"layer {self.layers[row]}: of {loads.shape[1]} experts, {named} got less than {STARVED:.0%} of the mean "
                    f"load in {PATIENCE} reports of {steps} steps each, too few tokens to learn from. Raise "
                    f"task.model.feed_forward.balance, or set selection_bias"
                )


def relative_loads(load: Loads) -> Loads:
    """Divide each expert's load by the mean of its layer; zeros for a layer without load.

    >>> relative_loads(np.array([[1.0, 3.0], [0.0, 0.0]])).tolist()
    [[0.5, 1.5], [0.0, 0.0]]
    """
    mean = load.mean(axis=1, keepdims=True)
    return np.divide(load, mean, out=np.zeros_like(load), where=mean > 0)


def load_statistics(loads: Loads) -> dict[str, Float[np.ndarray, " layer"]]:
    """Compute per-layer statistics of relative loads.

    `load_entropy` is 1 if all experts are equally loaded and 0 if one takes all tokens. `max_violation` is
    the relative excess of the largest load over the mean (arXiv:2408.15664).
    """
    share = loads / loads.shape[1]
    entropy = -(share * np.log(np.maximum(share, 1e-12))).sum(axis=1) / np.log(max(2, loads.shape[1]))
    return {
        "load_min": loads.min(axis=1),
        "load_max": loads.max(axis=1),
        "max_violation": loads.max(axis=1) - 1.0,
        "load_entropy": entropy,
    }
