"""The warning that chosen answers become less likely while accuracy rises."""

import numpy as np
import pytest

from panax.models import DecoderConfig, DecoderTask, Kto, NextToken, Preference
from panax.models.objectives.chosen_monitor import ChosenMonitor


def follow(chosen: list[float], accuracies: list[float]) -> list[str]:
    monitor, warnings = ChosenMonitor(), []
    for step, (one, accuracy) in enumerate(zip(chosen, accuracies, strict=True), start=1):
        monitor.add(
            {"logps/chosen": np.float32(one), "rewards/accuracies": np.float32(accuracy), "experts/load": np.ones(3)}
        )
        if step % 10 == 0:
            warnings += monitor.take().warnings
    return warnings


FALLING, STEADY = list(np.linspace(-10, -20, 60)), [-10.0] * 60
RISING, LEVEL = list(np.linspace(0.5, 1.0, 60)), [0.5] * 60


@pytest.mark.parametrize(("chosen", "accuracies"), [(STEADY, RISING), (FALLING, LEVEL), (FALLING[::-1], RISING),
                                                    ([np.nan] * 60, RISING)])  # fmt: skip
def test_other_courses_are_not_worth_a_warning(chosen: list[float], accuracies: list[float]) -> None:
    assert follow(chosen, accuracies) == []


def test_falling_chosen_answers_are_reported_once() -> None:
    (warning,) = follow(FALLING, RISING)
    assert "chosen answers have become less likely, -10.76 to -14.15 nats" in warning and "sft_weight" in warning


def test_tasks_of_preferences_follow_them() -> None:
    model = DecoderConfig(embed=32, num_layers=1, heads=2, ffn=32)
    monitor = DecoderTask(model=model, objective=Preference()).create_monitor()
    assert monitor is not None
    for chosen in FALLING:
        monitor.add({"logps/chosen": chosen, "rewards/accuracies": 0.5 if chosen > -15 else 1.0})
    assert len(monitor.take().warnings) == 1 and not monitor.take().warnings
    assert all(DecoderTask(model=model, objective=each).create_monitor() is None for each in (NextToken(), Kto()))
