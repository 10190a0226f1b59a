"""The closed form against lives that are simulated failure by failure, and against theory."""

import dataclasses
import math

import pytest

from panax.core.errors import RecipeError
from panax.plan.goodput import Fleet, StageTimes, best_every, forecast, simulate_lives, young_daly_seconds

TIMES = StageTimes(
    step=10.0, every=60, stall=5.0, detect=30.0, teardown=10.0, restart=60.0, restore=60.0, first_step=90.0
)
FLEET = Fleet(devices=16384, days=400)


CHANGED = [
    {}, {"commit": 200.0}, {"commit": 900.0}, {"stall": 0.0, "every": 1}, {"data_wait": 1.0, "evaluation": 2.0, "commit": 30.0},
]  # fmt: skip


def check_lives(changed: dict, devices: int, days: float) -> None:
    times, fleet = dataclasses.replace(TIMES, **changed), dataclasses.replace(FLEET, devices=devices, days=days)
    lives, result = simulate_lives(times, fleet, count=8, seed=1), forecast(times, fleet)
    # A life's ends shift it by up to one interval.
    ends = times.interval / (lives.days * 86400)
    assert abs(lives.goodput - result.goodput) < 3.5 * lives.standard_error + ends
    assert lives.standard_error < 0.01
    spread = 4 / math.sqrt(lives.failures_per_day * lives.days * lives.count)
    assert lives.restart == pytest.approx(result.shares["restart"], rel=spread)
    assert lives.failures_per_day == pytest.approx(result.failures_per_day, rel=spread)
    assert sum(result.shares.values()) == pytest.approx(1)


@pytest.mark.parametrize("changed", CHANGED, ids=str)
def test_simulated_lives_agree_with_the_closed_form(changed):
    check_lives(changed, 16384, 30.0)


@pytest.mark.slow
@pytest.mark.parametrize("changed", CHANGED, ids=str)
@pytest.mark.parametrize("devices", [1024, 16384, 131072])
def test_long_lives_agree_with_the_closed_form(changed, devices):
    check_lives(changed, devices, 1000.0)


def check_with_copies(every: int, lost: float, days: float) -> None:
    times = dataclasses.replace(TIMES, every=every, copy_every=6, copy_stall=0.5, commit=100.0)
    fleet = dataclasses.replace(FLEET, days=days, copies_lost=lost)
    lives = simulate_lives(times, fleet, count=8, seed=2)
    assert abs(lives.goodput - forecast(times, fleet).goodput) < 3.5 * lives.standard_error + 1e-3


def test_with_copies_in_memory_lives_agree_to_a_tenth_of_a_point():
    check_with_copies(60, 0.3, 20.0)


@pytest.mark.slow
@pytest.mark.parametrize("lost", [0.0, 0.01, 0.3, 1.0])
@pytest.mark.parametrize("every", [60, 600])
def test_with_copies_in_memory_long_lives_agree_to_a_tenth_of_a_point(lost, every):
    check_with_copies(every, lost, 1000.0)


OTHERWISE = [
    {"shrinks": True, "replacement": 7200.0},
    {"planned_stops_per_day": 2.0, "planned_stop": 600.0},
    {"replacement": 1200.0},
]


def check_otherwise(changed: dict, devices: int, days: float) -> None:
    fleet = dataclasses.replace(FLEET, devices=devices, days=days, **changed)
    lives = simulate_lives(TIMES, fleet, count=8, seed=3)
    assert abs(lives.goodput - forecast(TIMES, fleet).goodput) < 3.5 * lives.standard_error + 3e-3


@pytest.mark.parametrize("changed", OTHERWISE, ids=str)
def test_lives_that_shrink_stop_or_wait_agree_to_three_tenths_of_a_point(changed):
    check_otherwise(changed, 16384, 15.0)


@pytest.mark.slow
@pytest.mark.parametrize("changed", OTHERWISE, ids=str)
@pytest.mark.parametrize("devices", [4096, 16384])
def test_long_lives_that_shrink_stop_or_wait_agree_to_three_tenths_of_a_point(changed, devices):
    check_otherwise(changed, devices, 300.0)


def test_shrinking_beats_waiting_for_a_late_replacement():
    waiting = dataclasses.replace(FLEET, replacement=3600.0)
    assert forecast(TIMES, dataclasses.replace(waiting, shrinks=True)).goodput > forecast(TIMES, waiting).goodput + 0.2


def test_lives_are_those_of_their_seed():
    fleet = dataclasses.replace(FLEET, days=3)
    first, again, other = (simulate_lives(TIMES, fleet, count=4, seed=seed) for seed in (4, 4, 5))
    assert first == again != other


@pytest.mark.parametrize("stall", [0.5, 5.0, 60.0])
@pytest.mark.parametrize("devices", [512, 16384, 131072])
def test_best_interval_is_that_of_theory(stall, devices):
    times = dataclasses.replace(TIMES, step=1.0, every=60, stall=stall)
    fleet = dataclasses.replace(FLEET, devices=devices)
    seconds, theory = best_every(times, fleet) * times.step, young_daly_seconds(times, fleet)
    assert seconds == pytest.approx(theory, abs=1.0)
    # Young's first-order formula, and the next term of Daly's.
    mean = 1 / fleet.failures_per_second
    young = math.sqrt(2 * stall * mean)
    assert theory == pytest.approx(young * (1 + math.sqrt(stall / mean / 2) / 3) - stall, rel=0.02)


def test_best_interval_is_not_shorter_than_the_commit():
    times = dataclasses.replace(TIMES, step=1.0, stall=0.1, commit=300.0)
    assert young_daly_seconds(times, FLEET) == 300.0 and best_every(times, FLEET) == 300


def test_best_interval_is_better_than_its_neighbours_with_copies_in_memory():
    times = dataclasses.replace(TIMES, copy_every=6, copy_stall=0.5, commit=60.0)
    fleet = dataclasses.replace(FLEET, copies_lost=0.05)
    best = best_every(times, fleet)
    values = [forecast(dataclasses.replace(times, every=best + near), fleet).goodput for near in (-12, -6, 0, 6, 12)]
    assert max(values) == values[2] and best * times.step > 2 * young_daly_seconds(TIMES, fleet)
    assert best * times.step == pytest.approx(young_daly_seconds(times, fleet), rel=0.15)


def test_nothing_fails():
    fleet = dataclasses.replace(FLEET, failures_per_device_day=0.0, days=1)
    found = forecast(TIMES, fleet)
    assert found.goodput == pytest.approx(600 / 605) and found.shares["restart"] == found.shares["lost work"] == 0
    assert found.seconds_between_failures == young_daly_seconds(TIMES, fleet) == math.inf
    assert simulate_lives(TIMES, fleet, count=2).goodput == pytest.approx(600 / 605, rel=0.01)
    assert best_every(TIMES, fleet) == (86400 - 5) // 10


@pytest.mark.parametrize("rate", [20.0, 86400.0])
def test_a_run_that_never_advances_has_no_goodput(rate):
    fleet = dataclasses.replace(FLEET, failures_per_device_day=rate)
    found = forecast(TIMES, fleet)
    assert found.goodput == found.ettr == 0 and not found.advances and sum(found.shares.values()) == pytest.approx(1)
    assert best_every(TIMES, fleet) == 1 and simulate_lives(TIMES, fleet, count=2).goodput == 0


@pytest.mark.parametrize(
    ("field", "value", "said"),
    [
        ("step", 0.0, "step=0: expected a number above 0"), ("step", -1.0, "step=-1"), ("step", math.nan, "not NaN"),
        ("stall", -1.0, "stall=-1: expected a number from 0"), ("detect", math.inf, "detect=inf"), ("every", 0, "every=0"),
        ("copy_every", 7, "every=60 is not a multiple of copy_every=7; use every=56"),
        ("copy_stall", 1.0, "no effect without copies"), ("restart_per_doubling", 5.0, "needs measured_devices"),
    ],
)  # fmt: skip
def test_wrong_times_are_named(field, value, said):
    with pytest.raises(RecipeError, match=said):
        dataclasses.replace(TIMES, **{field: value})


@pytest.mark.parametrize(
    ("field", "value", "said"),
    [
        ("devices", 0, "devices=0"), ("devices", 12, "devices=12 is not a multiple of devices_per_host=8; use 8 or 16"),
        ("devices", 4, "use 8 devices"), ("failures_per_device_day", -1.0, "failures_per_device_day=-1"), ("days", 0.0, "days=0"),
        ("failures_per_device_day", math.nan, "not NaN"), ("copies_lost", 1.5, "copies_lost=1.5"), ("shrinks", True, "no effect"),
        ("devices_per_host", 0, "devices_per_host=0"), ("planned_stop", -1.0, "planned_stop=-1"),
    ],
)  # fmt: skip
def test_a_wrong_fleet_is_named(field, value, said):
    with pytest.raises(RecipeError, match=said):
        dataclasses.replace(FLEET, **{field: value})


def test_times_and_fleet_must_fit_each_other():
    with pytest.raises(
        RecipeError, match=r"a checkpoint comes after 0.695 days, and the run lasts 0.5 days; use at most 4319"
    ):
        forecast(dataclasses.replace(TIMES, every=6000), dataclasses.replace(FLEET, days=0.5))
    with pytest.raises(RecipeError, match=r"planned stops of 220 s each take 1.27 days out of every day"):
        forecast(TIMES, dataclasses.replace(FLEET, planned_stops_per_day=500.0))
    with pytest.raises(RecipeError, match="lives=1"):
        simulate_lives(TIMES, FLEET, count=1)
    with pytest.raises(RecipeError, match="seed=-1"):
        simulate_lives(TIMES, FLEET, seed=-1)
