"""The figures of expert load, and the warning of one that starves."""

import numpy as np
import pytest

from panax.core import HeatMap, MetricMonitor, MonitorReport
from panax.layers import ExpertLoadMonitor
from panax.layers.moe.expert_load import load_statistics, relative_loads


def step(load, **others):
    return {"experts/load": np.asarray(load, np.float32), **{f"experts/{k}": np.asarray(v) for k, v in others.items()}}


def test_figures_of_an_even_and_of_a_collapsed_layer():
    figures = load_statistics(
        relative_loads(np.array([[5.0, 5.0, 5.0, 5.0], [20.0, 0.0, 0.0, 0.0], [1.0, 1.0, 3.0, 3.0]]))
    )
    np.testing.assert_allclose(figures["load_min"], [1.0, 0.0, 0.5])
    np.testing.assert_allclose(figures["load_max"], [1.0, 4.0, 1.5])
    np.testing.assert_allclose(figures["max_violation"], [0.0, 3.0, 0.5])
    thirds = -(2 * 0.125 * np.log(0.125) + 2 * 0.375 * np.log(0.375)) / np.log(4)
    np.testing.assert_allclose(figures["load_entropy"], [1.0, 0.0, thirds], atol=1e-12)


def test_a_record_is_of_all_steps_since_the_last():
    watch = ExpertLoadMonitor((1, 3))
    watch.add(step([[4, 0], [1, 3]], entropy=[0.2, 0.4], dropped=[0.0, 0.5]))
    watch.add(step([[0, 4], [1, 3]], entropy=[0.4, 0.8], dropped=[0.0, 0.1]))
    assert isinstance(watch, MetricMonitor)
    scalars, heat_maps, warnings = watch.take()
    assert heat_maps.keys() == {"experts/load"}
    assert heat_maps["experts/load"][1:] == HeatMap(None, (1, 3), "layer", "expert")[1:]
    np.testing.assert_allclose(heat_maps["experts/load"].values, [[1.0, 1.0], [0.5, 1.5]])
    assert warnings == []
    expected = {
        "experts/layer_1/load_max": 1.0, "experts/layer_3/load_max": 1.5, "experts/load_max": 1.5,
        "experts/layer_1/load_min": 1.0, "experts/layer_3/load_min": 0.5, "experts/load_min": 0.5,
        "experts/max_violation": 0.5, "experts/layer_1/entropy": 0.3, "experts/entropy": 0.45,
        "experts/layer_3/dropped": 0.3, "experts/dropped": 0.15,
    }  # fmt: skip
    assert {name: scalars[name] for name in expected} == pytest.approx(expected)
    assert watch.take() == MonitorReport()


def test_a_dense_model_has_no_figures():
    watch = ExpertLoadMonitor(())
    watch.add({"other": np.zeros((2, 2))})
    assert watch.take() == MonitorReport()


def warnings_of(watch, *loads):
    watch.add(step(loads))
    return watch.take().warnings


EVEN, STARVING = (10.0, 10.0, 10.0), (15.0, 0.0, 15.0)


def test_a_starving_expert_is_warned_of_once_by_layer_and_number():
    watch = ExpertLoadMonitor((1, 3))
    found = [warnings_of(watch, EVEN, STARVING) for _ in range(6)]
    assert [len(lines) for lines in found] == [0, 0, 1, 0, 0, 0]
    assert found[2][0].startswith(
        "layer 3: of 3 experts, 1 got less than 1% of the mean load in 3 reports of 1 steps each"
    )


def test_experts_that_starve_for_a_moment_are_not_warned_of():
    watch = ExpertLoadMonitor((0,))
    for load in (STARVING, STARVING, EVEN, STARVING, STARVING, EVEN):
        assert warnings_of(watch, load) == []


def test_an_expert_that_recovered_is_warned_of_again():
    watch = ExpertLoadMonitor((0,))
    crumbs = (15.0, 0.2, 15.0)
    loads = [STARVING] * 3 + [crumbs] + [STARVING] * 3 + [EVEN] + [STARVING] * 3
    found = [index for index, load in enumerate(loads) if warnings_of(watch, load)]
    assert found == [2, 10], "crumbs are no recovery, an even load is"


def test_many_starving_experts_are_counted():
    watch = ExpertLoadMonitor((0,))
    (found,) = [line for _ in range(3) for line in warnings_of(watch, [1.0] + [0.0] * 15)]
    assert "1, 2, 3, 4, 5, 6, 7, 8 and 7 more got" in found
