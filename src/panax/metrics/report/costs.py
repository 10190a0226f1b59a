"""Device-hours by what they went into, and their price at a rate."""

import bisect
import dataclasses
import math
from collections.abc import Mapping

from ...core.errors import RecipeError
from .reading import RunFiles
from .wording import format_money


@dataclasses.dataclass(frozen=True)
class Rate:
    """What an hour of a device costs.

    Attributes:
        per_hour: None where none was given: there are no prices then.
    """

    per_hour: float | int | None
    currency: str

    @classmethod
    def of(cls, rate: float | int | None, currency: str) -> "Rate":
        """A rate that was given by a person.

        Raises:
            RecipeError: It is not a price.
        """
        if rate is not None and (isinstance(rate, bool) or not math.isfinite(rate) or rate < 0):
            raise RecipeError(f"rate={rate}; expected the price of a device-hour: a number from 0 up, as in --rate 2.5")
        if not currency.strip() or len(currency) > 12 or not currency.isprintable():
            raise RecipeError(f"currency={currency!r}; expected its name or sign, as in --currency EUR")
        return cls(rate, currency.strip())

    def price(self, device_hours: float | int | None) -> str:
        """Of device-hours; empty where it is not known."""
        if self.per_hour is None or device_hours is None:
            return ""
        return format_money(device_hours * self.per_hour, self.currency)


@dataclasses.dataclass(frozen=True)
class DeviceHours:
    """What devices were held for.

    Attributes:
        by_kind: Of the ledger's kinds, idle time left out: no device was held then.
    """

    by_kind: Mapping[str, float | int]

    @property
    def total(self) -> float | int:
        return sum(self.by_kind.values())

    @property
    def training(self) -> float | int:
        """Into steps that count."""
        return self.by_kind.get("training", 0.0)


def compute_device_hours(run: RunFiles) -> DeviceHours | None:
    """A run's device-hours; None where the ledger or the number of devices is lacking.

    The time between a session that failed and the next counts with the devices of the former: they waited.
    """
    if run.life is None:
        return None
    sessions = run.life.sessions
    counts = {session.number: run.devices(session) for session in sessions}
    if any(count is None for count in counts.values()):
        return None
    found: dict[str, float | int] = {}
    begins = [session.began for session in sessions]
    for kind, begin, end in run.life.spans:
        if kind == "idle":
            continue
        # A span may reach over sessions: what lies between two of them is the former's.
        n = max(bisect.bisect_right(begins, begin) - 1, 0)
        while begin < end:
            until = min(end, begins[n + 1]) if n + 1 < len(begins) else end
            found[kind] = found.get(kind, 0.0) + (until - begin) * (counts[sessions[n].number] or 0) / 3600
            begin, n = until, n + 1
    return DeviceHours(found)
