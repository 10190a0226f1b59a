"""What is measured of a run, and where it is shown."""

from .clock import StepClock
from .console import ConsoleTracker
from .heat_map import heat_map
from .lane import Lane
from .throughput import Peak, memory_in_use_bytes, peak_of
from .trackers import JsonlTracker, TensorBoardTracker, Tracker, Trackers

__all__ = [
    "ConsoleTracker", "JsonlTracker", "Lane", "Peak", "StepClock", "TensorBoardTracker", "Tracker",
    "Trackers", "heat_map", "memory_in_use_bytes", "peak_of",
]  # fmt: skip
