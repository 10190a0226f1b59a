"""How evenly a mixture's experts are loaded: figures for each layer, a heat map, and a warning when an expert starves."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from jaxtyping import Float, UInt8

PREFIX = "experts/"
"""What the names of the metrics begin with that are arrays with a row for each mixture layer."""

STARVED = 0.01
"""An expert that gets less than this share of the mean load of its layer is starving."""

PIXELS = 12
"""Height of a layer and width of an expert in the heat map."""

Loads = Float[np.ndarray, "layer expert"]


class ExpertWatch:
    """Adds up what routers report from one record to the next.

    Attributes:
        layers: The number of the layer that each row is of.
    """

    def __init__(self, layers: Sequence[int]):
        self.layers = tuple(layers)
        self._sums: dict[str, np.ndarray] = {}
        self._steps = 0
        self._starving: set[tuple[int, int]] = set()

    def add(self, metrics: Mapping[str, Any]) -> None:
        """Take one step's arrays, of which those are used that the routers report."""
        found = {name: np.asarray(value, np.float64) for name, value in metrics.items() if name.startswith(PREFIX)}
        if found:
            self._sums = {name: self._sums.get(name, 0.0) + value for name, value in found.items()}
            self._steps += 1

    def take(self) -> tuple[dict[str, float], Loads | None, list[str]]:
        """Scalars by name, each expert's load as a multiple of its layer's mean, warnings; all since the last call."""
        if not self._steps:
            return {}, None, []
        means = {name: total / self._steps for name, total in self._sums.items()}
        self._sums, steps, self._steps = {}, self._steps, 0
        loads = relative_loads(means.pop(f"{PREFIX}load"))
        figures = {**load_figures(loads), **{name.removeprefix(PREFIX): value for name, value in means.items()}}
        scalars = {
            f"{PREFIX}layer_{layer}/{name}": float(values[row])
            for name, values in figures.items()
            for row, layer in enumerate(self.layers)
        }
        scalars |= {f"{PREFIX}{name}": float(values.mean()) for name, values in figures.items()}
        scalars[f"{PREFIX}max_violation"] = float(figures["max_violation"].max())
        return scalars, loads, list(self._warnings(loads, steps))

    def _warnings(self, loads: Loads, steps: int) -> Iterator[str]:
        starving = {(int(row), int(expert)) for row, expert in np.argwhere(loads < STARVED)}
        for row in sorted({row for row, _ in starving - self._starving}):
            experts = sorted(expert for r, expert in starving if r == row)
            named = ", ".join(map(str, experts[:8])) + (f" and {len(experts) - 8} more" if len(experts) > 8 else "")
            yield (
                f"layer {self.layers[row]}: of {loads.shape[1]} experts, {named} got less than {STARVED:.0%} of the mean load "
                f"over the last {steps} steps; they learn nothing. Raise model.feed_forward.balance, or set selection_bias"
            )
        self._starving = starving


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


def heat_map(loads: Loads) -> UInt8[np.ndarray, "height width 3"]:
    """A picture with a row for each layer, the first on top, and a column for each expert.

    White is the mean load, blue none, red twice the mean and more.
    """
    above, below = np.clip(loads - 1.0, 0.0, 1.0), np.clip(1.0 - loads, 0.0, 1.0)
    red, blue = np.array([178.0, 24.0, 43.0]), np.array([33.0, 102.0, 172.0])
    colours = 255.0 - above[..., None] * (255.0 - red) - below[..., None] * (255.0 - blue)
    image = np.kron(colours, np.ones((PIXELS, PIXELS, 1)))
    # A grey line between cells, where there are few enough to count.
    if loads.shape[1] <= 64:
        image[PIXELS - 1 :: PIXELS] = image[:, PIXELS - 1 :: PIXELS] = 200.0
    return image.astype(np.uint8)
