"""Averages of the parameters, evaluated and exported instead of them."""

import dataclasses
from typing import ClassVar

import jax
import jax.numpy as jnp

from ...optim.transformation import Transformation
from ..frozen_params import Rows, mask_frozen_layers
from .step_part import DenseUpdate, StepFacts, StepPart


@dataclasses.dataclass(frozen=True)
class ExponentialAverage(StepPart):
    """Move the average towards the parameters after each update: after n of them, the decay is at most
    (1 + n) / (10 + n)."""

    decay: float

    name: ClassVar[str] = "average"

    def update(self, update: DenseUpdate, facts: StepFacts) -> DenseUpdate:
        updates = (facts.state.step + 1 - facts.guard.skipped).astype(jnp.float32)
        share = 1.0 - jnp.minimum(self.decay, (1.0 + updates) / (10.0 + updates))
        averaged = jax.tree.map(
            lambda a, p: a + share.astype(a.dtype) * (p.astype(a.dtype) - a), update.averaged, update.params
        )
        return update._replace(averaged=averaged)


@dataclasses.dataclass(frozen=True)
class OptimizerAverage(StepPart):
    """The average that an optimizer derives from its state, such as that of schedule-free AdamW."""

    transformation: Transformation
    frozen_rows: Rows | None

    name: ClassVar[str] = "average"

    def update(self, update: DenseUpdate, facts: StepFacts) -> DenseUpdate:
        assert self.transformation.average is not None
        average = self.transformation.average(update.params, update.optimizer_state)
        return update._replace(averaged=mask_frozen_layers(average, self.frozen_rows, update.params))
