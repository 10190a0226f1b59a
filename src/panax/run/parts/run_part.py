"""`RunPart`: something that a run does beside its steps, and `RunProgress`, the value that parts share.

After each step the parts act in the order of the run's list. A part reads the progress and records its
requests in it: another phase of the run, an evaluation, a save. No part changes another one.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax

from ...core import Position, TrainState
from ...train import Scalars
from .phases import RunEvent, RunPhase, next_phase
from .run_start import RunStart


@dataclasses.dataclass
class RunProgress:
    """Progress of a run: the value that its parts share.

    Attributes:
        state: The state after `step` steps; absent while an earlier one is restored.
        position: Position in the data after the last step.
        drawn: Number of the last batch that a step has taken, in the data's order.
        parts: The parts of the run, in their order.
        batch: The last batch, on the devices.
        scalars: The scalars of the last step, which the devices may still be computing.
        evaluation: The evaluation after the last step; empty if there was none.
        phase: The phase of the run, which decides on its next action.
        stop_reason: Why a hook ended the run; empty if none did.
        must_evaluate: True if a part requests an evaluation after this step.
        must_save: True if a part requests a checkpoint of this step.
        batches_left: Number of further batches that are made of the last item of the data; a checkpoint waits until there
            are none.
    """

    state: TrainState
    step: int
    position: Position | None
    drawn: int
    parts: tuple["RunPart", ...]
    batch: dict[str, jax.Array] = dataclasses.field(default_factory=dict)
    scalars: Scalars = dataclasses.field(default_factory=dict)
    evaluation: Mapping[str, float] = dataclasses.field(default_factory=dict)
    phase: RunPhase = RunPhase.TRAINING
    stop_reason: str = ""
    must_evaluate: bool = False
    must_save: bool = False
    batches_left: int = 0

    def handle(self, event: RunEvent) -> None:
        """Change the phase by an event."""
        self.phase = next_phase(self.phase, event)

    def restore(self, start: RunStart, num_steps: int) -> None:
        """Continue from a start, with all parts."""
        self.state, self.step = start.state, start.step
        self.position, self.drawn, self.batches_left = start.position, start.progress.drawn, 0
        self.evaluation, self.must_evaluate, self.must_save = {}, False, False
        if self.step >= num_steps:
            self.handle(RunEvent.LAST_STEP)
        for part in self.parts:
            part.begin(self, start)

    def after_step(self, scalars: Scalars, position: Position | None, drawn: int, num_steps: int) -> None:
        """Count a step, and let each part act, up to the first that requires another state.

        Args:
            position: Position in the data after the step's batch.
            drawn: Number of the step's batch.
        """
        self.step += 1
        self.scalars, self.position, self.drawn = scalars, position, drawn
        self.evaluation, self.must_evaluate, self.must_save = {}, False, False
        if self.step == num_steps:
            self.handle(RunEvent.LAST_STEP)
        for part in self.parts:
            part.after_step(self)
            if self.phase.restores:
                return

    def record_evaluation(self, evaluation: Mapping[str, float]) -> None:
        """Record the evaluation of this step, and let each part act on it."""
        self.evaluation = evaluation
        for part in self.parts:
            part.after_evaluation(self)

    def to_host(self) -> dict[str, Any]:
        """Return the JSON values that a checkpoint of this step stores beside the arrays."""
        host: dict[str, Any] = {"data": None if self.position is None else dict(self.position)}
        for part in self.parts:
            host.update(part.to_host(self))
        return host

    @property
    def takes_steps(self) -> bool:
        """Return True if another step follows."""
        return self.phase is RunPhase.TRAINING


def is_step_due(every: int, number: int) -> bool:
    """Return True if something done every `every` steps is due after step `number`; never for 0."""
    return every > 0 and number % every == 0


class RunPart:
    """Base class of a run's parts: override the methods for the moments at which the part acts."""

    def begin(self, run: RunProgress, start: RunStart) -> None:
        """Begin, or continue from another state, after a rollback or an absence."""

    def after_step(self, run: RunProgress) -> None:
        """Act after a step. Every process of a job calls it."""

    def after_evaluation(self, run: RunProgress) -> None:
        """Act after an evaluation of the current state."""

    def to_host(self, run: RunProgress) -> Mapping[str, Any]:
        """Return the JSON values that a checkpoint of this step stores for the part."""
        return {}
