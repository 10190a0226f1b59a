"""`ChosenMonitor`: warns when a model prefers chosen answers more and more, and yet gives them less probability."""

import math
from collections.abc import Mapping
from typing import Any

from ...core.monitors import MonitorReport

CHOSEN, ACCURACY = "logps/chosen", "rewards/accuracies"
"""Names of the metrics that are followed."""

BASELINE_STEPS = 10
"""Number of first steps, of which later ones are compared with the mean."""

MIN_FALL = 0.25
"""Share of its first value by which the log-probability must fall."""

MIN_RISE = 0.05
"""Rise of the accuracy that makes a fall worth a warning."""


class ChosenMonitor:
    """Follows the log-probability of chosen answers, and the share of pairs in the right order.

    The loss of a pair depends on the difference of both answers alone, so that both may become less likely
    (DPO-Positive, arXiv:2402.13228).
    """

    def __init__(self) -> None:
        self._first: list[tuple[float, float]] = []
        self._recent: list[tuple[float, float]] = []
        self._warned = False

    def add(self, metrics: Mapping[str, Any]) -> None:
        """Receive one step's metrics by name."""
        values = (float(metrics.get(CHOSEN, math.nan)), float(metrics.get(ACCURACY, math.nan)))
        if all(map(math.isfinite, values)):
            (self._first if len(self._first) < BASELINE_STEPS else self._recent).append(values)

    def take(self) -> MonitorReport:
        """Return a warning, once in a run, if the steps since the last call show the fall."""
        recent, self._recent = self._recent, []
        if self._warned or not recent:
            return MonitorReport()
        (chosen_before, accuracy_before), (chosen, accuracy) = map(_mean, (self._first, recent))
        if chosen_before - chosen < MIN_FALL * abs(chosen_before) or accuracy - accuracy_before < MIN_RISE:
            return MonitorReport()
        self._warned = True
        return MonitorReport(
            warnings=[
                f"chosen answers have become less likely, {chosen_before:.4g} to {chosen:.4g} nats, while accuracy rose from "
                f"{accuracy_before:.2f} to {accuracy:.2f}: the model leaves both answers. Set task.objective.sft_weight, raise "
                f"task.objective.beta, or lower optimizer.schedule.peak"
            ]
        )


def _mean(values: list[tuple[float, float]]) -> tuple[float, float]:
    chosen, accuracies = zip(*values, strict=True)
    return sum(chosen) / len(chosen), sum(accuracies) / len(accuracies)
