"""Main figures of a run: its state, losses, speed, time, cost."""

import dataclasses
from collections.abc import Mapping, Sequence

from .costs import DeviceHours, Rate, compute_device_hours
from .curves import Curve
from .formats import format_value
from .incidents import RunIncident, list_incidents
from .run_files import RunFiles, number, text

LOSS, HELD_OUT, MFU, MEMORY = "train/loss", "evaluation/loss", "speed/mfu", "memory/bytes"
PER_SECOND = "_per_second"


@dataclasses.dataclass(frozen=True)
class RunStatus:
    """State of a run.

    Attributes:
        word: "done", "running", "stopped", "failed", "died" or "unknown".
        detail: The reason, in a few words.
        tone: As for `Tile`.
    """

    word: str
    detail: str
    tone: str


@dataclasses.dataclass(frozen=True)
class RunFigures:
    """Results for one run; computed once, shown in several places.

    Attributes:
        goodput: Share of the time, without idle time, spent on steps that count; None without a ledger.
        wall_seconds: From the first session's beginning to the last one's end.
        speed: (unit, median number per second).
    """

    run: RunFiles
    state: RunStatus
    mishaps: Sequence[RunIncident]
    device_hours: DeviceHours | None
    goodput: float | int | None
    wall_seconds: float | int | None
    speed: tuple[str, float | int] | None

    def last(self, name: str) -> float | int | None:
        """Return the last finite value of a curve."""
        curve = self.run.curves.get(name)
        return None if curve is None else curve.last

    def median(self, name: str) -> float | int | None:
        """Return the median of a curve."""
        curve = self.run.curves.get(name)
        return None if curve is None else curve.median

    def price(self, rate: Rate) -> str:
        """Return the price of all device-hours."""
        return "" if self.device_hours is None else rate.price(self.device_hours.total)


def compute_figures(run: RunFiles) -> RunFigures:
    """Compute a run's figures."""
    life = run.life
    speeds = speed_curves(run)
    speed = next(((unit, median) for unit, curve in speeds if (median := curve.median) is not None), None)
    return RunFigures(
        run=run,
        state=run_status(run),
        mishaps=list_incidents(run),
        device_hours=compute_device_hours(run),
        goodput=None if life is None else life.goodput,
        wall_seconds=_wall(run),
        speed=speed,
    )


def speed_curves(run: RunFiles) -> list[tuple[str, Curve]]:
    """Return (unit, curve of the number per second) pairs."""
    return [
        (name.removeprefix("speed/").removesuffix(PER_SECOND), curve)
        for name, curve in run.curves.items()
        if name.startswith("speed/") and name.endswith(PER_SECOND)
    ]


def _wall(run: RunFiles) -> float | int | None:
    if run.life is not None:
        return run.life.wall_seconds
    seconds = number(run.status, "seconds")
    if seconds is None and run.times is not None and len(run.times.seconds):
        return float(run.times.seconds[-1])
    return seconds


def run_status(run: RunFiles) -> RunStatus:
    """Determine a run's state: by its lock, by its newest session, else by its supervisor."""
    if run.alive:
        return RunStatus("running", "it is still training; this page shows its state when it was written", "busy")
    if run.life is not None and run.life.sessions[-1].end:
        return _ended(run.life.sessions[-1].end)
    end = run.status.get("end")
    if isinstance(end, Mapping):
        code, message = number(end, "exit_code"), text(end, "message")
        if code == 0:
            return RunStatus("done", "as reported by its supervisor", "good")
        stopped = code in (129, 130, 143)
        return RunStatus(
            "stopped" if stopped else "failed",
            format_value(message.removeprefix("stopped ")),
            "busy" if stopped else "bad",
        )
    if run.life is not None or run.status:
        return RunStatus("died", "its last session ended without a message", "bad")
    last_step = "" if run.last_step is None else f"; its log ends at step {run.last_step:,}"
    return RunStatus("unknown", f"goodput.jsonl, which records the end of a session, is missing{last_step}", "")


def _ended(end: str) -> RunStatus:
    if end == "done":
        return RunStatus("done", "all steps are taken", "good")
    if end.startswith("error"):
        return RunStatus("failed", format_value(end.removeprefix("error:").strip()), "bad")
    return RunStatus("stopped", format_value(end.removeprefix("stopped").strip(" :")), "busy")
