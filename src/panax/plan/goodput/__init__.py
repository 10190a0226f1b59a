"""Goodput at any number of devices, from a run's stage times and a failure rate: no jax, no device, no
network."""

from .fleet import Fleet
from .lives import Lives, simulate_lives
from .model import Forecast, best_every, forecast, young_daly_seconds
from .prediction import Simulation
from .simulation import simulate
from .stages import StageTimes

__all__ = [
    "Fleet", "Forecast", "Lives", "Simulation", "StageTimes", "best_every", "forecast", "simulate", "simulate_lives",
    "young_daly_seconds",
]  # fmt: skip
