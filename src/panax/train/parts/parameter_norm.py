"""The norm of the trained parameters after an update, reported and watched."""

from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import optax

from ...kernels.precision import accumulation_dtype
from .step_part import StepFacts, StepOutcome, StepPart

PARAMETER_NORM = "parameter_norm"


class ParameterNorm(StepPart):
    """Report the norm of the trained dense parameters."""

    name: ClassVar[str] = PARAMETER_NORM

    def after(self, outcome: StepOutcome, facts: StepFacts) -> StepOutcome:
        return outcome.report(**{PARAMETER_NORM: parameter_norm(outcome.trained)})


def parameter_norm(params: Any) -> jax.Array:
    """Compute the norm of all parameters, which is infinite or NaN if any of them is."""
    return optax.tree.norm(jax.tree.map(lambda p: p.astype(accumulation_dtype(p.dtype)), params)).astype(jnp.float32)
