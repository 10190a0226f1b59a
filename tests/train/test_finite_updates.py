"""An update that is not finite is reported before it is saved, whatever it came from; a metric takes none of the step's names."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import panax
from panax.checkpoint import CheckpointConfig
from panax.core import Evaluation, Loss, Mean, Task
from panax.core.errors import RecipeError, TrainingError
from panax.mesh import MeshShape
from panax.optim import (
    AdamW,
    CustomSchedule,
    Lamb,
    LazyAdam,
    Muon,
    Optax,
    RowAdagrad,
    RowWiseAdagrad,
    Schedule,
    ScheduleFreeAdamW,
)

ALONE = MeshShape(replica=1, fsdp=1)


class Line(Task):
    """Weights, and one that no gradient reaches."""

    def __init__(self, metrics=()):
        self.metrics = metrics

    def init(self, key):
        return {"w": jnp.full((4,), 0.1), "unused": jnp.ones((3,))}, {}

    def parameter_axes(self, params):
        return {"w": (None,), "unused": (None,)}

    def loss(self, params, state, batch, key, train):
        error = ((batch["x"] @ params["w"]) ** 2).sum() + 0.0 * params["unused"].sum()
        count = jnp.float32(batch["x"].shape[0])
        return Evaluation({"objective": Loss(error, count)}, state, {name: Mean(error, count) for name in self.metrics})


BATCH = {"x": np.ones((8, 4), np.float32)}


def experiment(tmp_path, optimizer, task=None, **settings):
    return panax.Experiment(
        name="run", task=task or Line(), data=[BATCH], num_steps=4, optimizer=optimizer, directory=str(tmp_path), mesh=ALONE,
        checkpoint=CheckpointConfig(every=1), **settings,
    )  # fmt: skip


def infinite(step):
    return jnp.where(step == 2, jnp.inf, 1e-2)


UPDATES = {
    "a rate": (AdamW(schedule=CustomSchedule(function=infinite)), "step 3: the learning rate of this update is inf"),
    "optax's own": (
        Optax(transformation=optax.sgd(infinite)),
        "step 3: the parameters are not finite after this update",
    ),
}


@pytest.mark.parametrize("case", UPDATES)
def test_an_infinite_update_ends_the_run_before_it_is_saved(case, tmp_path):
    optimizer, words = UPDATES[case]
    with pytest.raises(TrainingError, match=words):
        panax.fit(experiment(tmp_path, optimizer), quiet=True, devices=jax.devices()[:1])
    saved = sorted(path.name for path in (tmp_path / "checkpoints").glob("step_*"))
    assert saved[-1] == "step_00000002"


def test_a_loop_of_ones_own_is_reported_too():
    step = panax.compile_step(
        Line(), BATCH, Optax(transformation=optax.sgd(infinite)), mesh=ALONE, devices=jax.devices()[:1]
    )
    state = step.init()
    for _ in range(3):
        state, _ = step(state, BATCH)
    with pytest.raises(TrainingError, match="step 3: the parameters are not finite after this update"):
        step.raise_faults()


@pytest.mark.parametrize("value", [-1e-8, float("inf"), float("nan")])
@pytest.mark.parametrize("optimizer", [AdamW, Lamb, Muon, ScheduleFreeAdamW, LazyAdam, RowAdagrad, RowWiseAdagrad])
def test_an_epsilon_that_is_no_small_number_is_refused(optimizer, value):
    with pytest.raises(RecipeError, match="epsilon"):
        optimizer(epsilon=value)


@pytest.mark.parametrize("optimizer", [AdamW, Lamb, Muon, ScheduleFreeAdamW])
def test_an_epsilon_that_divides_by_zero_is_refused_by_the_run(optimizer):
    with pytest.raises(RecipeError, match=r"optimizer.epsilon=0.0; expected a positive number"):
        optimizer(epsilon=0.0).build({"w": ("embed", "ffn")}, 10)


@pytest.mark.parametrize("optimizer", [LazyAdam, RowAdagrad, RowWiseAdagrad])
def test_an_epsilon_of_tables_that_divides_by_zero_is_refused(optimizer):
    with pytest.raises(RecipeError, match=r"embedding_optimizer.epsilon=0.0; expected a positive number"):
        optimizer(epsilon=0.0)


@pytest.mark.parametrize("name", ["loss", "gradient_norm", "learning_rate", "skipped", "loss/objective", "averaged"])
def test_a_metric_takes_no_name_of_the_steps_own(name):
    step = panax.compile_step(Line((name,)), BATCH, AdamW(), mesh=ALONE, devices=jax.devices()[:1])
    with pytest.raises(RecipeError, match=f"reports a metric '{name}', a name that the step itself reports"):
        step(step.init(), BATCH)
    with pytest.raises(RecipeError, match=f"reports a metric '{name}'"):
        step.evaluate(step.init(), [BATCH])


def test_a_rate_that_is_finite_changes_nothing(tmp_path):
    result = panax.fit(experiment(tmp_path, AdamW(schedule=Schedule(peak=1e-2))), quiet=True, devices=jax.devices()[:1])
    assert result.step == 4
