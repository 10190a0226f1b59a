"""`Fleet`: the devices of a run, their failure rate, and the response to failures."""

import dataclasses
import math

from ...core.errors import RecipeError
from ...core.validation import Validated
from .stages import StageTimes, check_amount

FAILURES_PER_DEVICE_DAY = 4.7e-4
"""Default failure rate: 419 unexpected interruptions of 16,384 GPUs in 54 days.

Source: The Llama 3 Herd of Models (arXiv:2407.21783), section 3.3.4.
"""

SECONDS_PER_DAY = 86400.0
MOST_DEVICES = 10**8


@dataclasses.dataclass(frozen=True, kw_only=True)
class Fleet(Validated):
    """Devices that fail independently of each other and of their age, and the run's response.

    Attributes:
        devices: Number of devices.
        failures_per_device_day: Failures that end the run's processes, per device and day.
        devices_per_host: Devices per host; a failure removes a whole host.
        days: Duration of the run.
        planned_stops_per_day: Planned stops per day, which save first: maintenance, another version of the
            code.
        planned_stop: Seconds of a planned stop; None: teardown, restart, restore and first step.
        replacement: Seconds until a lost host is replaced.
        shrinks: True if the run continues on the remaining devices until the host is replaced, and grows again
            at the next checkpoint; otherwise it waits.
        copies_lost: Probability that a failure destroys copies in memory; None: the probability that the
            neighboring host also fails before the run has recovered.
    """

    devices: int
    failures_per_device_day: float | int = FAILURES_PER_DEVICE_DAY
    devices_per_host: int = 8
    days: float | int = 30.0
    planned_stops_per_day: float | int = 0.0
    planned_stop: float | int | None = None
    replacement: float | int = 0.0
    shrinks: bool = False
    copies_lost: float | int | None = None

    def __post_init__(self) -> None:
        check_amount(self, "devices", minimum=1, maximum=MOST_DEVICES)
        check_amount(self, "devices_per_host", minimum=1, maximum=MOST_DEVICES)
        check_amount(self, "failures_per_device_day", maximum=SECONDS_PER_DAY)
        check_amount(self, "days", above=True, maximum=1e5)
        check_amount(self, "planned_stops_per_day", maximum=SECONDS_PER_DAY)
        check_amount(self, "replacement")
        if self.planned_stop is not None:
            check_amount(self, "planned_stop")
        if self.copies_lost is not None:
            check_amount(self, "copies_lost", maximum=1.0)
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if field.name not in ("devices", "devices_per_host", "shrinks") and value is not None:
                object.__setattr__(self, field.name, float(value))
        if self.devices % self.devices_per_host:
            lower = self.devices - self.devices % self.devices_per_host
            near = [count for count in (lower, lower + self.devices_per_host) if count]
            raise RecipeError(
                f"devices={self.devices} is not a multiple of devices_per_host={self.devices_per_host}; use "
                f"{' or '.join(map(str, near))} devices, or set --devices-per-host"
            )
        if self.shrinks and self.devices == self.devices_per_host:
            raise RecipeError(
                f"shrinks=True with devices={self.devices}: there is one host, and none remains when it fails; remove it"
            )
        if self.shrinks and not self.replacement:
            raise RecipeError(
                "shrinks=True has no effect if a lost host is replaced at once; set replacement, in seconds"
            )

    @property
    def failures_per_second(self) -> float:
        """Return the failure rate of all devices together."""
        return self.devices * self.failures_per_device_day / SECONDS_PER_DAY

    def recovery(self, stages: StageTimes) -> float:
        """Return the seconds from a failure until the first step after it, without further failures."""
        waits = 0.0 if self.shrinks else self.replacement
        return stages.detect + waits + self.planned(stages, of_recovery=True)

    def planned(self, stages: StageTimes, *, of_recovery: bool = False) -> float:
        """Return the seconds of a stop that saves first."""
        if self.planned_stop is not None and not of_recovery:
            return self.planned_stop
        return stages.teardown + stages.restart_at(self.devices) + stages.restore + stages.first_step

    def destroys_copies(self, stages: StageTimes) -> float:
        """Return the probability that a failure destroys copies in memory."""
        if self.copies_lost is not None:
            return self.copies_lost
        if self.devices == self.devices_per_host:
            return 1.0
        neighbor = self.devices_per_host * self.failures_per_device_day / SECONDS_PER_DAY
        return -math.expm1(-neighbor * self.recovery(stages))


def check_together(stages: StageTimes, fleet: Fleet) -> None:
    """Check constraints between stage times and fleet.

    Raises:
        RecipeError: No checkpoint is saved within the run, or planned stops take all of it.
    """
    days = (stages.interval + stages.stall) / SECONDS_PER_DAY
    if days > fleet.days:
        max_steps = int((fleet.days * SECONDS_PER_DAY - stages.stall) / stages.step_with_waits)
        raise RecipeError(
            f"every={stages.every}: a checkpoint comes after {days:.3g} days, and the run lasts {fleet.days:g} days; "
            + (f"use at most {max_steps} steps, or set --days" if max_steps >= 1 else "set --days to more")
        )
    share = fleet.planned_stops_per_day * fleet.planned(stages) / SECONDS_PER_DAY
    if share >= 1:
        raise RecipeError(
            f"planned_stops_per_day={fleet.planned_stops_per_day:g}: planned stops of {fleet.planned(stages):g} s each take "
            f"{share:.3g} days out of every day; plan fewer of them, or shorter ones"
        )
