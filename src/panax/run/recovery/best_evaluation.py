"""The best evaluation of a run so far, as its checkpoints store it."""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

BEST = "best"
"""Name under which a checkpoint stores the best evaluation of its run so far."""


@dataclasses.dataclass(frozen=True)
class BestEvaluation:
    """The evaluation with the lowest held-out loss so far, and its step."""

    loss: float
    step: int

    @classmethod
    def of(cls, saved: Any) -> "BestEvaluation | None":
        """Read the value in a checkpoint; None if it is of an earlier version, or of another form."""
        loss, step = (saved.get("loss"), saved.get("step")) if isinstance(saved, Mapping) else (None, None)
        if not isinstance(loss, int | float) or not math.isfinite(loss) or not isinstance(step, int):
            return None
        return cls(float(loss), step)
