"""`check_task` passes right tasks, names the fault of others, and reports the skipped layouts."""

import jax.numpy as jnp
import numpy as np
import pytest
from spmd import broken_tasks
from spmd.broken_tasks import Split

from panax.core import Evaluation, LayoutError, Loss, Task
from panax.testing import check_task


class Plane(Task):
    """Sees whole arrays; nothing of a mesh is written in it."""

    def init(self, key):
        return {"w": jnp.zeros((4,), jnp.float32)}, {}

    def parameter_axes(self, params):
        return {"w": ("embed",)}

    def loss(self, params, state, batch, key, train):
        error = batch["x"] @ params["w"] - batch["y"]
        return Evaluation({"squares": Loss(jnp.sum(error * error), jnp.float32(error.size))}, state, {})


def points(rows=16):
    x = np.random.default_rng(0).standard_normal((rows, 4), dtype=np.float32)
    return {"x": x, "y": x @ np.array([1.0, -2.0, 0.5, 0.0], np.float32)}


def test_a_task_that_knows_no_mesh():
    report = check_task(Plane(), points())
    assert report.compared == ("replica=2", "fsdp=2", "expert=2", "fsdp=2 · expert=2 · replica=2")
    # 16 terms of float32.
    assert report.tolerance == pytest.approx(8 * 2.0**-24 * 4)


def test_a_task_that_names_its_axes():
    layouts = [{"fsdp": 2, "tensor": 2}, {"tensor": 3}]
    report = check_task(Split(), broken_tasks.batch(), axes=broken_tasks.AXES, layouts=layouts)
    assert report.compared == ("fsdp=2 · tensor=2",)
    assert "is not divisible by tensor=3" in report.left_out["tensor=3"]


def test_what_does_not_fit_is_an_error_where_nothing_does():
    with pytest.raises(AssertionError, match="no layout fits"):
        check_task(Plane(), points(rows=3))


class DependsOnTheMesh(Plane):
    """Each device's rows have a mean of their own."""

    names_axes = True

    def loss(self, params, state, batch, key, train):
        from panax.spmd import gather

        w = gather(params["w"], "embed", jnp.float32)
        error = (batch["x"] * w[None]).sum(axis=1) - batch["y"]
        return Evaluation({"squares": Loss(self.mean(error), jnp.float32(1.0))}, state, {})

    def mean(self, error):
        return jnp.square(error - error.mean()).sum()


def test_a_statistic_of_each_devices_own_rows_is_found_before_it_runs():
    with pytest.raises(LayoutError, match=r"the same constant|partial sum"):
        check_task(DependsOnTheMesh(), points(), layouts=[{"fsdp": 2}])


class WrongNumbers(DependsOnTheMesh):
    """What can't be followed is compared: rows are weighed by their place on their own device."""

    def mean(self, error):
        place = jnp.arange(error.shape[0], dtype=jnp.float32)
        return (jnp.square(error) * place).sum()


def test_numbers_of_another_layout_are_found():
    with pytest.raises(AssertionError, match=r"fsdp=2: the gradient, w is .* from one device's"):
        check_task(WrongNumbers(), points(), layouts=[{"fsdp": 2}])
