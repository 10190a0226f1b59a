"""Loss scaling: the factor on a loss before differentiation, so that float16 gradients do not underflow.

The step chooses the factor (`train/loss_scaling.py`) and divides the gradients by it; code that
differentiates a loss reads it here.
"""

import contextlib
from collections.abc import Iterator, Mapping
from contextvars import ContextVar

import jax

from .measures import Losses, Scalar, total_loss

_scale: ContextVar[jax.Array | None] = ContextVar("panax_loss_scale", default=None)


@contextlib.contextmanager
def use_loss_scale(scale: jax.Array | None) -> Iterator[None]:
    """Trace gradients inside for a loss multiplied by `scale`; None for an unscaled loss."""
    token = _scale.set(scale)
    try:
        yield
    finally:
        _scale.reset(token)


def scaled_objective(losses: Losses, weights: Mapping[str, Scalar] | None = None) -> Scalar:
    """Compute the total loss multiplied by the current loss scale, as it is differentiated; arguments as in
    `total_loss`.
    """
    total, scale = total_loss(losses, weights), _scale.get()
    return total if scale is None else total * scale
