"""How evenly a mixture's experts are loaded: figures for each layer and of all, and a warning when an expert starves.

Reads what the routers of all mixture layers report as metrics (`router_measures`), on the host.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from jaxtyping import Float

from ..core.watching import HeatMap, Watched

PREFIX = "experts/"
"""What the names of the metrics begin with that are arrays with a row for each mixture layer."""

STARVED = 0.01
"""An expert that gets less than this share of the mean load of its layer is starving."""

PATIENCE = 3
"""Records in which an expert starves before it is warned of: while routers settle, many do for a few steps."""

RECOVERED = 0.1
"""An expert that gets this share again is counted, and warned of, anew."""

EXTREMES = {"load_min": np.min, "load_max": np.max, "max_violation": np.max}
"""What stands for all layers; of other figures it is the mean."""

Loads = Float[np.ndarray, "layer expert"]


class ExpertWatch:
    """Adds up what routers report from one record to the next; a `core.watching.MetricMonitor`.

    Attributes:
        layers: The number of the layer that each row is of.
    """

    def __init__(self, layers: Sequence[int]):
        self.layers = tuple(layers)
        self._sums: dict[str, np.ndarray] = {}
        self._steps = 0
        self._starved: Any = 0

    def add(self, metrics: Mapping[str, Any]) -> None:
        """Take one step's arrays, of which those are used that the routers report."""
        found = {name: np.asarray(value, np.float64) for name, value in metrics.items() if name.startswith(PREFIX)}
        if found:
            self._sums = {name: self._sums.get(name, 0.0) + value for name, value in found.items()}
            self._steps += 1

    def take(self) -> Watched:
        """Figures of each layer and of all, each expert's load as a multiple of its layer's mean, and warnings."""
        if not self._steps:
            return Watched()
        means = {name: total / self._steps for name, total in self._sums.items()}
        self._sums, steps, self._steps = {}, self._steps, 0
        loads = relative_loads(means.pop(f"{PREFIX}load"))
        figures = {**load_figures(loads), **{name.removeprefix(PREFIX): value for name, value in means.items()}}
        scalars = {
            f"{PREFIX}layer_{layer}/{name}": float(values[row])
            for name, values in figures.items()
            for row, layer in enumerate(self.layers)
        }
        scalars |= {f"{PREFIX}{name}": float(EXTREMES.get(name, np.mean)(values)) for name, values in figures.items()}
        table = HeatMap(loads, self.layers, "layer", "expert")
        return Watched(scalars, {f"{PREFIX}load": table}, list(self._warnings(loads, steps)))

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
    """Each expert's load as a multiple of the mean of its layer; zeros in a layer without any.

    >>> relative_loads(np.array([[1.0, 3.0], [0.0, 0.0]])).tolist()
    [[0.5, 1.5], [0.0, 0.0]]
    """
    mean = load.mean(axis=1, keepdims=True)
    return np.divide(load, mean, out=np.zeros_like(load), where=mean > 0)


def load_figures(loads: Loads) -> dict[str, Float[np.ndarray, " layer"]]:
    """For each layer, of loads relative to their mean.

    `load_entropy` is 1 where all experts are loaded alike and 0 where one takes all. `max_violation` is by how much of the mean
    the largest load exceeds it (arXiv:2408.15664).
    """
    share = loads / loads.shape[1]
    entropy = -(share * np.log(np.maximum(share, 1e-12))).sum(axis=1) / np.log(max(2, loads.shape[1]))
    return {
        "load_min": loads.min(axis=1),
        "load_max": loads.max(axis=1),
        "max_violation": loads.max(axis=1) - 1.0,
        "load_entropy": entropy,
    }
