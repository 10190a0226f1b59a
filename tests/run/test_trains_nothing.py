"""Runs that would train nothing, or the wrong way, warn or are refused."""

from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import panax
from panax.core import RecipeError
from panax.optim import AdamW, CustomSchedule, Schedule, Sgd


class Line(eqx.Module):
    w: jax.Array

    def __init__(self, key, dtype=jnp.float32):
        self.w = jnp.full((4,), 0.1, dtype)


def squares(model, batch):
    return jnp.mean((batch["x"].astype(model.w.dtype) @ model.w - 1.0) ** 2)


BATCH = {"x": np.random.default_rng(0).normal(size=(8, 4)).astype(np.float32)}


def lines_of(tmp_path, loss=squares, net: Callable[[Any], Line] = Line, **settings):
    lines: list[str] = []
    usual = {"data": [BATCH], "num_steps": 2, "directory": str(tmp_path / "run")}
    task = panax.adapters.equinox.task(lambda key: net(key), loss)
    panax.fit(
        panax.Experiment(name="x", task=task, **{**usual, **settings}), say=lines.append, devices=jax.devices()[:1]
    )
    return lines


def test_a_loss_that_depends_on_no_parameter_is_reported_once(tmp_path):
    lines = lines_of(tmp_path, lambda model, batch: jax.lax.stop_gradient(squares(model, batch)))
    (line,) = [line for line in lines if "gradient is exactly 0" in line]
    assert line.startswith("warning: step 1:") and "depends on no parameter that trains" in line


def test_a_loss_of_parameters_is_not_warned_of(tmp_path):
    assert not [line for line in lines_of(tmp_path) if "exactly 0" in line or "parameters are in bfloat16" in line]


@pytest.mark.parametrize("data", [BATCH, dict(BATCH, y=BATCH["x"][:, 0])])
def test_one_batch_in_place_of_a_list_is_refused_with_what_to_write(tmp_path, data):
    with pytest.raises(RecipeError, match=r"data is one batch \(a dict with x.*write data=\[batch\]"):
        lines_of(tmp_path, data=data)
    with pytest.raises(RecipeError, match=r"write data=\[batch\]"):
        lines_of(tmp_path, held_out=data)


def test_a_rate_below_zero_is_refused():
    with pytest.raises(RecipeError, match=r"gives -0.01 at step 6; expected a learning rate of 0 or more"):
        CustomSchedule(function=lambda step: 0.05 - 0.01 * step).build(10)
    with pytest.raises(RecipeError, match=r"gives -0.001 at step 0"):
        CustomSchedule(function=lambda step: -1e-3).build(1)
    for function in (
        lambda step: jnp.maximum(0.05 - 0.01 * step, 0.0),
        lambda step: 1 / jnp.sqrt(step),
        lambda step: 0.0,
    ):
        CustomSchedule(function=function).build(10)


@pytest.mark.parametrize(
    ("optimizer", "said"),
    [
        (AdamW(schedule=Schedule(peak=3e-5)), True),
        (AdamW(schedule=Schedule(peak=3e-5), rounding="stochastic"), False),
        (AdamW(schedule=Schedule(peak=1e-2)), False),
        (Sgd(schedule=CustomSchedule(function=lambda step: 1e-5)), False),
    ],
    ids=["small", "stochastic", "large", "own"],
)
def test_bfloat16_parameters_at_a_small_rate_are_noted(tmp_path, optimizer, said):
    lines = lines_of(tmp_path, net=lambda key: Line(key, jnp.bfloat16), optimizer=optimizer)
    found = [line for line in lines if "parameters are in bfloat16" in line]
    assert len(found) == said and all('optimizer.rounding="stochastic"' in line for line in found)
