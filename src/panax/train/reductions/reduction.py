"""`Reduction`: a way to sum gradients over devices, and the terms that it sums.

A device's gradient of a parameter is a partial sum over the mesh axes that its parameter is not split over. Some are
summed in the backward pass (`early_sum.py`); the reduction sums the others, once a step. A program has exactly one, a
chain of kinds: delayed sums pass the previous batch's terms on to the next kind, compressed ones take the parameters
that are worth it, and the plain sum takes the rest.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple, Protocol

import jax

from ...comms.delayed_gradients import Terms
from ...comms.reduction import Residuals
from ...core import Axes
from ...core.layout.layout import Layout
from ...mesh.rules import MeshAxes
from ...spmd.overlapped_grad_reduce import GradReduceOverlap


class GradientTerms(NamedTuple):
    """One device's gradients, by parameter, on the way to sums over devices.

    Attributes:
        values: Each gradient: a partial sum over the mesh axes in `rest`, or the whole sum for a name that `rest`
            lacks; None for a frozen parameter.
        rest: Mesh axes over which a gradient is still to be summed.
        axes: Logical axes of each parameter.
        step: Step number, the seed of stochastic rounding; with `comms` only.
        residuals: Residuals of compressed sums.
        delayed: Terms of the previous batch, and after a delayed sum those of this one.
        early: The sums in the backward pass; None if there were none.
    """

    values: Mapping[str, Any]
    rest: Mapping[str, MeshAxes]
    axes: Mapping[str, Axes]
    step: jax.Array | None
    residuals: Residuals
    delayed: Terms | None
    early: GradReduceOverlap | None


class Reduction(Protocol):
    """A way to sum gradients over devices."""

    def reduce(self, terms: GradientTerms, layout: Layout) -> GradientTerms:
        """Return the terms with nothing left to sum."""
        ...
