"""What a batch's order, its parts and its filling may not change: loss, gradients and metrics of every task (K3, K4)."""

from typing import Any

import jax
import numpy as np
import pytest

from census.tasks import CASES, Case, make_step
from panax.core import named_leaves
from panax.core.errors import RecipeError
from panax.train import CompiledStep

# A sum of some hundred float32 terms in another order, relative to the largest: 2**-24 for each of log2(terms) levels of adding.
TOLERANCE = 32 * 2.0**-24
UNPACKED = ("tokens", "targets", "loss_mask")


STEPS: dict[str, CompiledStep] = {}


def reuse_step(case: Case, **config: Any) -> CompiledStep:
    """A step with its programs, made once for equal tasks, leaves and settings."""
    key = repr((case.task, sorted(case.axes), sorted(config.items())))
    if key not in STEPS:
        STEPS[key] = make_step(case, **config)
    return STEPS[key]


def taken(case: Case, batch: dict[str, np.ndarray], **config: Any) -> dict[str, np.ndarray]:
    """The parameters after one step of gradient descent, the loss, and the metrics of an evaluation of the same batch."""
    step = reuse_step(case, **config)
    state = step.init(0)
    merged = step.evaluate(state, step.put(batch))
    sums = {
        f"{name}/{field}": np.asarray(value)
        for name, measure in {**merged["losses"], **merged["metrics"]}.items()
        for field, value in vars(measure).items()
        if field not in ("coefficient", "checks")
    }
    state, scalars = step(state, step.put(batch))
    assert int(scalars["skipped"]) == 0
    return {
        **sums,
        "loss": np.asarray(scalars["loss"]),
        **{n: np.asarray(x) for n, x in named_leaves(state.params).items()},
    }


def assert_alike(one: dict[str, np.ndarray], two: dict[str, np.ndarray]) -> None:
    assert one.keys() == two.keys()
    for name, value in one.items():
        wide = value.astype(np.float64)
        np.testing.assert_allclose(
            two[name], wide, rtol=TOLERANCE, atol=TOLERANCE * max(1.0, float(np.abs(wide).max())), err_msg=name
        )


@pytest.fixture(scope="module", params=CASES)
def usual(request) -> tuple[str, Case, dict[str, np.ndarray], dict[str, np.ndarray]]:
    case = without_dropout(CASES[request.param])
    batch = case.draw(1)
    return request.param, case, batch, taken(case, batch)


def without_dropout(case: Case) -> Case:
    """Dropout is of a row's number, so that rows in another order drop other features."""
    import dataclasses

    model: Any = case.task.model
    if getattr(model, "dropout", 0.0):
        task: Any = case.task
        return case._replace(task=dataclasses.replace(task, model=dataclasses.replace(model, dropout=0.0)))
    return case


def test_rows_in_another_order_are_the_same_batch(usual):
    _, case, batch, wanted = usual
    order = np.random.default_rng(0).permutation(len(next(iter(batch.values()))))
    assert_alike(wanted, taken(case, {name: leaf[order] for name, leaf in batch.items()}))


@pytest.mark.parametrize("parts", [2, 4])
def test_parts_of_a_batch_add_up_to_it(usual, parts):
    _, case, batch, wanted = usual
    if not case.task.sums_over_rows:
        with pytest.raises(
            RecipeError, match=f"step.micro_batches={parts}: the loss of {type(case.task).__name__} compares"
        ):
            make_step(case, micro_batches=parts)
        return
    assert_alike(wanted, taken(case, batch, micro_batches=parts))


def test_rows_that_count_nothing_change_nothing(usual):
    """Filled with zeros, as `step.pad_rows` does, and with whatever the rows before hold."""
    _, case, batch, wanted = usual
    for fill in (np.zeros_like, np.copy):
        filled = {name: np.concatenate([leaf, fill(leaf)]) for name, leaf in batch.items()}
        filled["loss_mask"][len(batch["loss_mask"]) :] = 0
        assert_alike(wanted, taken(case, filled))


def axes_of_tasks() -> list[tuple[str, str]]:
    """Each task with each mesh axis that it declares."""
    return [(name, axis) for name, case in CASES.items() for axis in sorted(case.task.mesh_axes)]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "axis"), axes_of_tasks())
def test_rows_that_count_nothing_change_nothing_on_a_mesh(name, axis):
    case = without_dropout(CASES[name])
    batch = case.draw(1)
    filled = {name: np.concatenate([leaf, leaf]) for name, leaf in batch.items()}
    filled["loss_mask"][len(batch["loss_mask"]) :] = 0
    options = {"mesh": {axis: 2}, "micro_batches": 8 if axis == "stage" else 1}
    assert_alike(taken(case, batch, **options), taken(case, filled, **options))


@pytest.mark.parametrize("name", ["decoder", "mixture"])
@pytest.mark.parametrize("packed", [True, False])
def test_positions_behind_the_last_that_counts_change_nothing(name, packed):
    case = without_dropout(CASES[name])
    batch = {k: v[:, :16] for k, v in case.draw(1).items() if packed or k in UNPACKED}
    case = case._replace(draw=lambda seed: batch)
    rng = np.random.default_rng(0)
    longer = {k: np.concatenate([v, rng.integers(0, 2, (len(v), 8)).astype(v.dtype)], axis=1) for k, v in batch.items()}
    longer["loss_mask"][:, 16:] = 0
    if packed:
        longer["segment"][:, 16:] = 0
    wanted, actual = taken(case, batch), taken(case._replace(draw=lambda seed: longer), longer)
    assert_alike(wanted, actual)


@pytest.mark.parametrize("name", ["sasrec", "hstu"])
def test_events_filled_up_change_nothing(name):
    case = without_dropout(CASES[name])
    batch = {k: (v[:, :6] if v.ndim == 2 else v) for k, v in case.draw(1).items()}
    there = np.arange(6) < np.minimum((batch["items"] >= 0).sum(axis=1), 6)[:, None]
    batch["targets"] = np.where(there, batch["targets"], -1)
    longer = {
        k: np.concatenate([v, np.full((len(v), 2), -1 if k in ("items", "targets") else 0, v.dtype)], axis=1)
        if v.ndim == 2
        else v
        for k, v in batch.items()
    }
    assert_alike(
        taken(case._replace(draw=lambda seed: batch), batch), taken(case._replace(draw=lambda seed: longer), longer)
    )


@pytest.mark.parametrize("capacity", [0.75, None])
@pytest.mark.parametrize("choice", ["token", "expert"])
def test_filling_takes_no_place_at_an_expert(choice, capacity):
    import dataclasses

    if choice == "expert" and capacity is not None:
        return
    case = CASES["mixture"]
    task: Any = case.task
    feed_forward = dataclasses.replace(task.model.feed_forward, choice=choice, capacity=capacity)
    task = dataclasses.replace(task, model=dataclasses.replace(task.model, feed_forward=feed_forward))
    batch = {k: v[:, :16] for k, v in case.draw(1).items() if k in UNPACKED}
    batch["loss_mask"][:, -1] = 1
    longer = {k: np.concatenate([v, np.zeros_like(v)], axis=1) for k, v in batch.items()}
    wanted, actual = (taken(Case(task, lambda seed, b=b: b), b) for b in (batch, longer))
    assert_alike(wanted, actual)


def test_a_mixtures_batch_in_which_nothing_counts_teaches_nothing():
    case = CASES["mixture"]
    batch = case.draw(0)
    batch["loss_mask"][:] = 0
    step = reuse_step(case)
    state = step.init(0)
    before = {n: np.asarray(x) for n, x in named_leaves(state.params).items()}
    state, scalars = step(state, step.put(batch))
    assert int(scalars["skipped"]) == 1
    jax.tree.map(
        np.testing.assert_array_equal, before, {n: np.asarray(x) for n, x in named_leaves(state.params).items()}
    )
