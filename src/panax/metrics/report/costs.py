"""Device-hours by use, and their price at a rate."""

import bisect
import dataclasses
import math
from collections.abc import Mapping

from ...core.errors import RecipeError
from ..goodput import IDLE
from .formats import format_money
from .run_files import RunFiles


@dataclasses.dataclass(frozen=True)
class Rate:
    """Price of an hour of a device.

    Attributes:
        per_hour: Price of a device-hour; None to omit prices.
    """

    per_hour: float | int | None
    currency: str

    @classmethod
    def of(cls, rate: float | int | None, currency: str) -> "Rate":
        """Create a rate from the user's settings.

        Raises:
            RecipeError: The rate is not a price, or the currency is invalid.
        """
        if rate is not None and (isinstance(rate, bool) or not math.isfinite(rate) or rate < 0):
            raise RecipeError(f"rate={rate}; expected the price of a device-hour: a number from 0 up, as in --rate 2.5")
        if not currency.strip() or len(currency) > 12 or not currency.isprintable():
            raise RecipeError(f"currency={currency!r}; expected its name or sign, as in --currency EUR")
        return cls(rate, currency.strip())

    def price(self, device_hours: float | int | None) -> str:
        """Return the price of device-hours; empty if unknown."""
        if self.per_hour is None or device_hours is None:
            return ""
        return format_money(device_hours * self.per_hour, self.currency)


@dataclasses.dataclass(frozen=True)
class DeviceHours:
    """Use of device-hours.

    Attributes:
        by_kind: Device-hours by the ledger's kinds, without idle time, when no device was held.
    """

    by_kind: Mapping[str, float | int]

    @property
    def total(self) -> float | int:
        return sum(self.by_kind.values())

    @property
    def training(self) -> float | int:
        """Return the device-hours of steps that count."""
        return self.by_kind.get("training", 0.0)


def compute_device_hours(run: RunFiles) -> DeviceHours | None:
    """Compute a run's device-hours; None if the ledger or the number of devices is missing.

    The time between a session that failed and the next counts with the devices of the former: they waited.
    """
    if run.life is None:
        return None
    sessions = run.life.sessions
    counts = {session.number: run.devices(session) for session in sessions}
    if any(count is None for count in counts.values()):
        return None
    hours_by_kind: dict[str, float | int] = {}
    begins = [session.began for session in sessions]
    for kind, begin, end in run.life.spans:
        if kind == IDLE:
            continue
        # A span may cover several sessions: time between two of them belongs to the former.
        n = max(bisect.bisect_right(begins, begin) - 1, 0)
        while begin < end:
            until = min(end, begins[n + 1]) if n + 1 < len(begins) else end
            hours_by_kind[kind] = (
                hours_by_kind.get(kind, 0.0) + (until - begin) * (counts[sessions[n].number] or 0) / 3600
            )
            begin, n = until, n + 1
    return DeviceHours(hours_by_kind)
