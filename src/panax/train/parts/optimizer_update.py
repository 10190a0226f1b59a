"""The optimizer's update of dense parameters, and the learning rate that it reports."""

import dataclasses
from typing import ClassVar

import jax
import jax.numpy as jnp
import optax

from ...optim.transformation import Transformation, apply_updates
from ..frozen_params import Rows, mask_frozen_layers
from .step_part import DenseUpdate, StepFacts, StepPart

LEARNING_RATE = "learning_rate"


@dataclasses.dataclass(frozen=True)
class LearningRate(StepPart):
    """Report the learning rate, and skip an update of a rate that is not finite."""

    schedule: optax.Schedule

    name: ClassVar[str] = LEARNING_RATE

    def facts(self, facts: StepFacts) -> StepFacts:
        with jax.numpy_dtype_promotion("standard"):
            rate = jnp.asarray(self.schedule(facts.updates - facts.behind), jnp.float32)
        return facts.report(**{LEARNING_RATE: rate})

    def decide(self, applied: jax.Array, facts: StepFacts) -> jax.Array:
        return applied & jnp.isfinite(facts.scalars[LEARNING_RATE])


@dataclasses.dataclass(frozen=True)
class OptimizerUpdate(StepPart):
    """DenseUpdate the trained dense parameters; frozen layers stay as they are, whatever the optimizer decays."""

    transformation: Transformation
    frozen_rows: Rows | None

    name: ClassVar[str] = "optimizer"

    def update(self, update: DenseUpdate, facts: StepFacts) -> DenseUpdate:
        more = {"value": facts.loss} if self.transformation.takes_loss else {}
        updates, optimizer_state = self.transformation.update(
            update.gradients, update.optimizer_state, update.params, **more
        )
        params = apply_updates(update.params, mask_frozen_layers(updates, self.frozen_rows))
        return update._replace(params=params, optimizer_state=optimizer_state)
