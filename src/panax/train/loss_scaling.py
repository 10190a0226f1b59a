"""Dynamic scaling of the loss for tasks that compute in float16 (arXiv:1710.03740).

float16 has nothing between 6e-8 and 0, where many gradients lie, and nothing above 65,504. So the loss is multiplied with a
power of two, and gradients are divided by it again in their parameter's type, which changes no bit of what float16 could hold.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ..core import StepGuard
from ..core.errors import RecipeError

FIRST, STEPS = 2.0**15, 2000
"""The scale to begin with, and the good steps after which it is doubled."""
LEAST, MOST = 1.0, 2.0**24
"""The scale is never less, since a smaller one would only round more away, and never more."""


def check_settings(scale: float | None, steps: int | None) -> None:
    """Refuse a scale that is not one.

    Raises:
        RecipeError: Says what is expected.
    """
    if scale is not None and not (LEAST <= scale <= MOST and np.frexp(scale)[0] == 0.5):
        raise RecipeError(f"step.loss_scale={scale}; expected a power of two from {LEAST:.0f} to {MOST:.0f}, or None")
    if steps is not None and steps < 1:
        raise RecipeError(f"step.loss_scale_steps={steps}; expected 1 or more, or None")


def check_effect(scales: bool, task: str, scale: float | None, steps: int | None) -> None:
    """Refuse settings of the scale for a task whose loss is not scaled.

    Raises:
        RecipeError: Names them.
    """
    given = {"step.loss_scale": scale, "step.loss_scale_steps": steps}
    for name, value in given.items():
        if value is not None and not scales:
            raise RecipeError(
                f'{name}={value} has no effect: {task} does not compute in float16; set task.compute_dtype to "float16", or '
                f"leave {name} out"
            )


def unscale_gradients(gradients: Any, scale: jax.Array | None) -> Any:
    """Gradients of the loss, from those of the scaled one."""
    return gradients if scale is None else jax.tree.map(lambda g: g * (1 / scale).astype(g.dtype), gradients)


def holds_back(guard: StepGuard, finite: jax.Array) -> jax.Array:
    """Whether an update is left out only because the scale is still too large, which is no sign of a bad run."""
    return jnp.bool_(False) if guard.scale is None else ~finite & (guard.scale > LEAST)


def next_scale(guard: StepGuard, applied: jax.Array, finite: jax.Array, steps: int | None) -> dict[str, Any]:
    """The scale after a step, and the updates that were applied since it last changed.

    Args:
        finite: Whether loss and gradients were.
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
