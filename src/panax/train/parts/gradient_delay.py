"""Delayed gradients: a step applies those of the batch before, while it computes those of its own."""

import dataclasses
import functools
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from .step_part import StepFacts, StepInputs, StepOutcome, StepPart, replace_state


@dataclasses.dataclass(frozen=True)
class DelayedUpdate(StepPart):
    """Apply gradients one step late, at parameters that are predicted, if `comms.delay_correction` is set.

    Attributes:
        trainable: Bools with the structure of the parameters.
    """

    trainable: Any

    name: ClassVar[str] = "delayed"

    def view(self, inputs: StepInputs) -> StepInputs:
        return inputs._replace(params=inputs.state.delayed.extrapolate(inputs.params, self.trainable))

    def facts(self, facts: StepFacts) -> StepFacts:
        late = facts.state.delayed
        return facts._replace(
            # The loss is this batch's, which the next step applies.
            loss_is_finite=True,
            teaches=late.teaches,
            # The first step has no gradients yet.
            counted=late.begun,
            behind=late.begun.astype(jnp.int32),
        )

    def after(self, outcome: StepOutcome, facts: StepFacts) -> StepOutcome:
        teaches, before = facts.batch_teaches, facts.state
        return replace_state(
            outcome,
            model_state=jax.tree.map(functools.partial(jnp.where, teaches), facts.result.state, before.model_state),
            delayed=before.delayed.next_state(facts.terms or {}, teaches, facts.trained, outcome.trained),
        )
