"""The result of a simulation."""

import dataclasses
import json
import math
from collections.abc import Mapping
from typing import Any

from .fleet import Fleet
from .lives import Lives
from .model import Forecast
from .stages import StageTimes

COUNTS = (1024, 4096, 16384, 65536, 131072)
"""Numbers of devices in the table."""

STAGE_FIELDS = {field.name: field for field in dataclasses.fields(StageTimes)}
FLEET_FIELDS = {field.name: field for field in dataclasses.fields(Fleet)}


@dataclasses.dataclass(frozen=True)
class Simulation:
    """Result of a simulation for a number of devices.

    Attributes:
        run: The folder that was read; empty if no run was read.
        stages, fleet: Inputs of the computation.
        now: Forecast at the current interval.
        best: Forecast at the interval with the highest goodput in the model.
        theory: Seconds between checkpoints by theory (`young_daly_seconds`).
        lives: Simulated runs at the current interval.
        by_devices: For several numbers of devices, at the current interval and at the best one for each.
        by_interval: For several intervals, shortest first.
        sources: Source of each stage time, by field.
        assumptions: Sentences on everything that was not measured.
    """

    run: str
    stages: StageTimes
    fleet: Fleet
    now: Forecast
    best: Forecast
    theory: float
    lives: Lives
    by_devices: tuple[tuple[Forecast, Forecast], ...]
    by_interval: tuple[Forecast, ...]
    sources: Mapping[str, str]
    assumptions: tuple[str, ...]

    def to_json(self) -> str:
        """Serialize the result as JSON; times are in seconds."""

        def plain(prediction: Forecast) -> dict[str, Any]:
            between = prediction.seconds_between_failures
            return {
                **dataclasses.asdict(prediction),
                "goodput": prediction.goodput,
                "ettr": prediction.ettr,
                "seconds_between_failures": between if math.isfinite(between) else None,
            }

        return json.dumps(
            {
                "run": self.run,
                "stages": dataclasses.asdict(self.stages),
                "fleet": dataclasses.asdict(self.fleet),
                "now": plain(self.now),
                "best": plain(self.best),
                "theory_interval": self.theory if math.isfinite(self.theory) else None,
                "lives": dataclasses.asdict(self.lives),
                "by_devices": [{"now": plain(current), "best": plain(best)} for current, best in self.by_devices],
                "by_interval": [plain(prediction) for prediction in self.by_interval],
                "sources": dict(self.sources),
                "assumptions": list(self.assumptions),
            },
            indent=2,
        )
