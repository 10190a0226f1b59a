"""Histograms of weights and gradients, counted on the devices."""

from collections.abc import Mapping
from typing import Any

import jax

from ...core import TrainState, named_leaves
from ...metrics import Histogram
from ...metrics.histogram import compute_histogram, fetch_histogram
from ...train.compilation.step_protocol import StepProtocol


def weight_histograms(step: StepProtocol, state: TrainState, batch: Mapping[str, jax.Array]) -> dict[str, Histogram]:
    """Compute histograms of each parameter and its gradient: `weights/NAME` and `gradients/NAME`."""
    return {name: fetch_histogram(found) for name, found in step.summarize(state, batch, _spread).items()}


def _spread(params: Any, gradients: Any) -> dict[str, Histogram]:
    trees = {"weights": params, "gradients": gradients}
    return {
        f"{kind}/{name}": compute_histogram(leaf)
        for kind, tree in trees.items()
        for name, leaf in named_leaves(tree).items()
        if leaf.size and jax.numpy.issubdtype(leaf.dtype, jax.numpy.floating)
    }
