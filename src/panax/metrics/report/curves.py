"""Logged values of a run by name: read in one pass, without truncated lines."""

import bisect
from array import array
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float64

from ...system import json_reader

LARGEST_STEP = 2**53


class Curve(NamedTuple):
    """Values of one name, each from the last time that its step was taken; `y` is NaN for values that are not
    finite."""

    x: array
    y: array

    @property
    def last(self) -> float | int | None:
        """Return the last finite value."""
        return next((value for value in reversed(self.y) if np.isfinite(value)), None)

    @property
    def median(self) -> float | int | None:
        """Return the median of the finite values."""
        values = np.frombuffer(self.y, np.float64)
        values = values[np.isfinite(values)]
        return float(np.median(values)) if len(values) else None


def read_curves(path: Path) -> tuple[dict[str, Curve], int]:
    """Read (curves by name, number of unreadable lines) from a run's log, which may still be written."""
    curves: dict[str, Curve] = {}
    unread = last = 0
    with open(path, "rb") as file:
        for line in file:
            if not line.endswith(b"\n"):
                break
            row = _row(line)
            if row is None:
                unread += 1
                continue
            step = row.pop("step")
            if step < last:
                # These steps were repeated.
                for curve in curves.values():
                    keep = bisect.bisect_right(curve.x, step)
                    del curve.x[keep:], curve.y[keep:]
            last = step
            for name, value in row.items():
                if value is not None and type(value) not in (int, float):
                    continue
                curve = curves.get(name)
                if curve is None:
                    curve = curves[name] = Curve(array("d"), array("d"))
                parsed_value = float("nan") if value is None else _float(value)
                if curve.x and curve.x[-1] == step:
                    curve.y[-1] = parsed_value
                else:
                    curve.x.append(step)
                    curve.y.append(parsed_value)
    return {name: curve for name, curve in curves.items() if len(curve.x)}, unread


def _row(line: bytes) -> dict[str, Any] | None:
    try:
        row = json_reader.parse(line, constants=True)
    except ValueError:
        return None
    if not isinstance(row, dict) or type(row.get("step")) is not int or not 0 <= row["step"] <= LARGEST_STEP:
        return None
    return row


def _float(value: float | int) -> float | int:
    try:
        return float(value)
    except OverflowError:
        return float("nan")


class StepTimes(NamedTuple):
    """Times of steps, in seconds since the run began.

    Attributes:
        measured: True if from the run's ledger; otherwise the sum of the steps' seconds.
    """

    steps: Float64[np.ndarray, " anchor"]
    seconds: Float64[np.ndarray, " anchor"]
    measured: bool

    def at(self, steps: Any) -> Float64[np.ndarray, " step"]:
        """Return the times of these steps."""
        return np.interp(np.asarray(steps, np.float64), self.steps, self.seconds)


def infer_step_times(curves: Mapping[str, Curve]) -> StepTimes | None:
    """Compute times from `seconds/step`, which is the mean of the steps since the previous line."""
    curve = curves.get("seconds/step")
    if curve is None:
        return None
    steps, each = np.frombuffer(curve.x, np.float64), np.nan_to_num(np.frombuffer(curve.y, np.float64))
    passed = np.cumsum(np.diff(steps, prepend=0.0) * each)
    return StepTimes(np.concatenate([[0.0], steps]), np.concatenate([[0.0], passed]), False)
