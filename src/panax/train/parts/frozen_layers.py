"""Frozen layers of stacked parameters: excluded from norms, and not updated."""

import dataclasses
from typing import ClassVar

from ...core import Gradients
from ..frozen_params import Rows, mask_frozen_layers
from .step_part import StepPart


@dataclasses.dataclass(frozen=True)
class FrozenLayers(StepPart):
    """Set gradients of frozen layers to zero; `OptimizerUpdate` leaves the layers unchanged."""

    rows: Rows

    name: ClassVar[str] = "frozen_layers"

    def gradients(self, result: Gradients) -> Gradients:
        return result._replace(gradients=mask_frozen_layers(result.gradients, self.rows))
