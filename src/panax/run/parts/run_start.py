"""`RunStart`: the state from which a run begins or continues."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from ...core import Position, TrainState
from ..folder.base_model import NamedBase
from ..recovery.best_evaluation import BestEvaluation
from ..recovery.skipped_batches import DataProgress


@dataclasses.dataclass(frozen=True)
class RunStart:
    """The state and position from which a run begins, or continues after a rollback.

    Attributes:
        step: Steps taken before.
        position: Position in the data; None for its beginning.
        stored_step: The step of the store's checkpoint with this state; None if there is none.
        hooks: The state of the run's hooks in the checkpoint, by their names.
        progress: Progress of the run in its data.
        source: The source of the state.
        best: The best evaluation up to this state; None if there was none.
        host: JSON values of the state's checkpoint; empty without one.
        base: Weights that the state's checkpoint names instead of holding them; None if there are none.
    """

    state: TrainState
    step: int
    position: Position | None
    stored_step: int | None
    hooks: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    progress: DataProgress = dataclasses.field(default_factory=DataProgress)
    source: str = "the first state"
    best: BestEvaluation | None = None
    base: NamedBase | None = None
    host: Mapping[str, Any] = dataclasses.field(default_factory=dict)
