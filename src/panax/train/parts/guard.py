"""The guard against updates that are not finite, spikes, and a loss scale that is too large."""

import dataclasses
import functools
from typing import ClassVar

import jax
import jax.numpy as jnp

from ...core import StepGuard
from ..loss_scaling import next_scale, should_skip_update
from .step_part import StepFacts, StepOutcome, StepPart

NORM_DECAY = 0.98
"""Decay of the running mean of gradient norms, which covers about 50 steps."""


@dataclasses.dataclass(frozen=True)
class SpikeGuard(StepPart):
    """Skip an update with a gradient norm above `factor` times the running mean."""

    factor: float

    name: ClassVar[str] = "spike_guard"

    def facts(self, facts: StepFacts) -> StepFacts:
        usual = facts.state.guard.usual_norm
        return facts._replace(usual=(usual == 0.0) | (facts.norm <= self.factor * usual))


class LossScale(StepPart):
    """Report the loss scale of a task that computes in float16; the guard adjusts it."""

    name: ClassVar[str] = "loss_scale"

    def after(self, outcome: StepOutcome, facts: StepFacts) -> StepOutcome:
        return outcome.report(loss_scale=outcome.state.guard.scale)


def next_guard(facts: StepFacts, finite: jax.Array, applied: jax.Array, loss_scale_steps: int | None) -> StepGuard:
    """Return the guard's next state, given whether the update is finite and whether it is applied."""
    guard = facts.guard
    usual = guard.usual_norm
    moved = jnp.where(usual == 0.0, facts.norm, NORM_DECAY * usual + (1 - NORM_DECAY) * facts.norm)
    counts = ~should_skip_update(guard, finite)
    following = StepGuard(
        skipped=guard.skipped + (~applied).astype(jnp.int32),
        skipped_in_a_row=jnp.where(applied, 0, guard.skipped_in_a_row + counts.astype(jnp.int32)),
        usual_norm=jnp.where(applied, moved, usual),
        **next_scale(guard, applied, finite, loss_scale_steps),
    )
    if facts.counted is True:
        return following
    return jax.tree.map(functools.partial(jnp.where, facts.counted), following, guard)
