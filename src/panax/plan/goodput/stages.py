"""`StageTimes`: how long each stage of a run takes, as far as goodput depends on it."""

import dataclasses
import math

from ...core.errors import RecipeError
from ...core.validation import Validated

MAX_SECONDS = 1e9
"""Seconds; no stage of a run takes thirty years."""


def check_amount(
    owner: object, name: str, *, least: float | int = 0.0, most: float | int = MAX_SECONDS, above: bool = False
) -> None:
    """Check that a number lies between two bounds.

    Args:
        above: The lower bound itself is not allowed.

    Raises:
        RecipeError: It does not; names the field and its flag.
    """
    value = getattr(owner, name)
    if math.isfinite(value) and (least < value if above else least <= value) and value <= most:
        return
    bound = f"above {least:g}" if above else f"from {least:g}"
    raise RecipeError(f"{name}={value:g}: expected a number {bound} to {most:g}; set --{name.replace('_', '-')}")


@dataclasses.dataclass(frozen=True, kw_only=True)
class StageTimes(Validated):
    """The stages of one run. Times are in seconds.

    Attributes:
        step: One training step; above 0.
        every: Steps between two checkpoints in the store.
        stall: How long a checkpoint holds training up: copying the state to the host.
        commit: From the end of the stall until the checkpoint can be restored, while training continues. A failure before
            that falls back to the checkpoint before. The next checkpoint waits for it.
        detect: From a failure until the supervisor knows of it.
        teardown: Ending the processes that are left.
        restart: From starting the processes until all have joined.
        restore: Reading the checkpoint.
        first_step: Compiling, and taking the first step.
        data_wait, evaluation: For each step, on average, beside `step`.
        copy_every: Steps between two copies in the memory of other hosts; 0 for no copies.
        copy_stall: How long a copy holds training up.
        restart_per_doubling: Added to `restart` for each doubling of the devices from `measured_devices`.
        measured_devices: How many devices the times were measured on; 0 where that is not known.

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
        check_amount(self, "every", least=1)
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
                f"copy_stall={self.copy_stall:g} has no effect without copies in memory; set copy_every, or leave it out"
            )
        if self.restart_per_doubling and not self.measured_devices:
            raise RecipeError(
                f"restart_per_doubling={self.restart_per_doubling:g} needs measured_devices: on how many devices restart was "
                "measured; set --measured-devices"
            )

    @property
    def step_with_waits(self) -> float:
        """Seconds of a step with its share of data wait and evaluation."""
        return self.step + self.data_wait + self.evaluation

    @property
    def interval(self) -> float:
        """Seconds of work between two checkpoints, without their stall."""
        return self.every * self.step_with_waits

    def restart_at(self, devices: int) -> float:
        """`restart` on so many devices."""
        if not self.restart_per_doubling:
            return self.restart
        return max(self.restart + self.restart_per_doubling * math.log2(devices / self.measured_devices), 0.0)
