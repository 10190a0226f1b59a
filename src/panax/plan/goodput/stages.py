"""`StageTimes`: durations of the stages of a run that goodput depends on."""

import dataclasses
import math

from ...core.errors import RecipeError
from ...core.validation import Validated

MAX_SECONDS = 1e9
"""Upper bound in seconds; no stage of a run takes thirty years."""


def check_amount(
    owner: object, name: str, *, minimum: float | int = 0.0, maximum: float | int = MAX_SECONDS, above: bool = False
) -> None:
    """Check that a number is between two bounds.

    Args:
        above: The lower bound itself is not allowed.

    Raises:
        RecipeError: The number is out of bounds; the message names the field and its flag.
    """
    value = getattr(owner, name)
    if math.isfinite(value) and (minimum < value if above else minimum <= value) and value <= maximum:
        return
    bound = f"above {minimum:g}" if above else f"from {minimum:g}"
    raise RecipeError(f"{name}={value:g}: expected a number {bound} to {maximum:g}; set --{name.replace('_', '-')}")


@dataclasses.dataclass(frozen=True, kw_only=True)
class StageTimes(Validated):
    """Stages of one run. Times are in seconds.

    Attributes:
        step: One training step; above 0.
        every: Steps between two checkpoints in the store.
        stall: Time for which a checkpoint blocks training: copying the state to the host.
        commit: From the end of the stall until the checkpoint can be restored, while training continues. A
            failure before that falls back to the previous checkpoint. The next checkpoint waits for it.
        detect: From a failure until the supervisor detects it.
        teardown: Ending the remaining processes.
        restart: From starting the processes until all have joined.
        restore: Reading the checkpoint.
        first_step: Compiling, and taking the first step.
        data_wait, evaluation: Average per step, in addition to `step`.
        copy_every: Steps between two copies in the memory of other hosts; 0 for no copies.
        copy_stall: Time for which a copy blocks training.
        restart_per_doubling: Added to `restart` for each doubling of the devices from `measured_devices`.
        measured_devices: Number of devices that the times were measured on; 0 if unknown.

    >>> recovery = {"detect": 30.0, "teardown": 10.0, "restart": 60.0, "restore": 60.0, "first_step": 90.0}
    >>> StageTimes(step=10.0, every=60, stall=5.0, **recovery).interval
    600.0
    """

    step: float | int
    every: int
    stall: float | int
    detect: float | int
    teardown: float | int
    restart: float | int
    restore: float | int
    first_step: float | int
    commit: float | int = 0.0
    data_wait: float | int = 0.0
    evaluation: float | int = 0.0
    copy_every: int = 0
    copy_stall: float | int = 0.0
    restart_per_doubling: float | int = 0.0
    measured_devices: int = 0

    def __post_init__(self) -> None:
        check_amount(self, "step", above=True)
        check_amount(self, "every", minimum=1)
        for field in dataclasses.fields(self):
            if field.name not in ("step", "every"):
                check_amount(self, field.name)
            if field.type is not int:
                object.__setattr__(self, field.name, float(getattr(self, field.name)))
        if self.copy_every and self.every % self.copy_every:
            near = max(self.every // self.copy_every, 1) * self.copy_every
            raise RecipeError(
                f"every={self.every} is not a multiple of copy_every={self.copy_every}; use every={near}, or another copy_every"
            )
        if self.copy_stall and not self.copy_every:
            raise RecipeError(
                f"copy_stall={self.copy_stall:g} has no effect without copies in memory; set copy_every, or remove it"
            )
        if self.restart_per_doubling and not self.measured_devices:
            raise RecipeError(
                f"restart_per_doubling={self.restart_per_doubling:g} needs measured_devices, the number of devices on which "
                "restart was measured; set --measured-devices"
            )

    @property
    def step_with_waits(self) -> float:
        """Return the seconds of a step with its share of data wait and evaluation."""
        return self.step + self.data_wait + self.evaluation

    @property
    def interval(self) -> float:
        """Return the seconds of work between two checkpoints, without their stall."""
        return self.every * self.step_with_waits

    def restart_at(self, devices: int) -> float:
        """Return `restart` for a number of devices."""
        if not self.restart_per_doubling:
            return self.restart
        return max(self.restart + self.restart_per_doubling * math.log2(devices / self.measured_devices), 0.0)
