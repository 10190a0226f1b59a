"""Measurements of a run, and their destinations."""

from typing import TYPE_CHECKING

from ..core.lazy import lazy_getattr

# Not lazily: the module and the function share a name.
from .heat_map import heat_map

if TYPE_CHECKING:
    from .background import BackgroundReporter
    from .clock import StepClock
    from .console import ConsoleTracker
    from .facts import RunFacts
    from .histogram import Histogram
    from .prometheus import PrometheusTracker
    from .services import CsvTracker, MlflowTracker, WandbTracker
    from .tensorboard import TensorBoardTracker
    from .throughput import Peak, find_peak_flops, memory_in_use_bytes
    from .trackers import JsonlTracker, Tracker, Trackers

__getattr__ = lazy_getattr(
    __name__,
    {
        "clock": ("StepClock",),
        "console": ("ConsoleTracker",),
        "facts": ("RunFacts",),
        "histogram": ("Histogram",),
        "background": ("BackgroundReporter",),
        "prometheus": ("PrometheusTracker",),
        "services": ("CsvTracker", "MlflowTracker", "WandbTracker"),
        "tensorboard": ("TensorBoardTracker",),
        "throughput": ("Peak", "memory_in_use_bytes", "find_peak_flops"),
        "trackers": ("JsonlTracker", "Tracker", "Trackers"),
    },
)

__all__ = [
    "BackgroundReporter", "ConsoleTracker", "CsvTracker", "Histogram", "JsonlTracker", "MlflowTracker", "Peak",
    "PrometheusTracker", "RunFacts", "StepClock", "TensorBoardTracker", "Tracker", "Trackers", "WandbTracker",
    "find_peak_flops", "heat_map", "memory_in_use_bytes",
]  # fmt: skip
