"""What a loss is multiplied with before it is differentiated, so that gradients in float16 are not too small for it.

The step decides (`train/loss_scaling.py`) and divides the gradients again; whoever differentiates a loss asks here for it.
"""

import contextlib
from collections.abc import Iterator, Mapping
from contextvars import ContextVar

import jax

from .measures import Losses, Scalar, total_loss

_scale: ContextVar[jax.Array | None] = ContextVar("panax_loss_scale", default=None)


@contextlib.contextmanager
def use_loss_scale(scale: jax.Array | None) -> Iterator[None]:
    """Trace gradients inside for a loss that is multiplied with `scale`; None for none."""
    token = _scale.set(scale)
    try:
        yield
    finally:
        _scale.reset(token)


def objective_of(losses: Losses, weights: Mapping[str, Scalar] | None = None) -> Scalar:
    """What is differentiated: the total loss, multiplied with the scale that is set; arguments as of `total_loss`."""
    total, scale = total_loss(losses, weights), _scale.get()
    return total if scale is None else total * scale
