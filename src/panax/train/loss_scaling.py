"""Dynamic loss scaling for tasks that compute in float16 (arXiv:1710.03740).

float16 has no values between 0 and 6e-8, the range of many gradients, and none above 65,504. The loss is
therefore multiplied by a power of two, and gradients are divided by it in their parameter's dtype, which
changes no bit of a value that float16 could represent.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ..core import StepGuard
from ..core.errors import RecipeError

FIRST, STEPS = 2.0**15, 2000
"""The initial scale, and the number of consecutive good steps after which it is doubled."""
LEAST, MOST = 1.0, 2.0**24
"""Bounds of the scale: below 1, it would only lose more precision."""


def check_settings(scale: float | None, steps: int | None) -> None:
    """Check that the loss scale and its interval are valid.

    Raises:
        RecipeError: A setting is invalid; the message states the valid values.
    """
    if scale is not None and not (LEAST <= scale <= MOST and np.frexp(scale)[0] == 0.5):
        raise RecipeError(f"step.loss_scale={scale}; expected a power of two from {LEAST:.0f} to {MOST:.0f}, or None")
    if steps is not None and steps < 1:
        raise RecipeError(f"step.loss_scale_steps={steps}; expected 1 or more, or None")


def check_effect(scales: bool, task: str, scale: float | None, steps: int | None) -> None:
    """Check that loss-scale settings are used only with a task that scales its loss.

    Raises:
        RecipeError: A setting has no effect; the message names it.
    """
    settings = {"step.loss_scale": scale, "step.loss_scale_steps": steps}
    for name, value in settings.items():
        if value is not None and not scales:
            raise RecipeError(
                f'{name}={value} has no effect: {task} does not compute in float16; set task.compute_dtype to "float16", or '
                f"remove {name}"
            )


def unscale_gradients(gradients: Any, scale: jax.Array | None) -> Any:
    """Divide gradients of the scaled loss by the scale."""
    return gradients if scale is None else jax.tree.map(lambda g: g * (1 / scale).astype(g.dtype), gradients)


def should_skip_update(guard: StepGuard, finite: jax.Array) -> jax.Array:
    """Return True if an update is skipped only because the scale is still too large, which does not indicate
    a bad run."""
    return jnp.bool_(False) if guard.scale is None else ~finite & (guard.scale > LEAST)


def next_scale(guard: StepGuard, applied: jax.Array, finite: jax.Array, steps: int | None) -> dict[str, Any]:
    """Return the scale after a step, and the number of updates applied since it last changed.

    Args:
        finite: True if loss and gradients are finite.
    """
    if guard.scale is None or guard.scaled_well is None:
        return {}
    well = guard.scaled_well + applied.astype(jnp.int32)
    grows = well >= (steps or STEPS)
    scale = jnp.where(grows, jnp.minimum(2 * guard.scale, MOST), guard.scale)
    return {
        "scale": jnp.where(finite, scale, jnp.maximum(guard.scale / 2, LEAST)),
        "scaled_well": jnp.where(finite & ~grows, well, 0),
    }
