"""Transformations of optax's that ask for more than gradients: the loss is given, what a step can't give is refused by name."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import panax
from panax.adapters import equinox
from panax.core.errors import RecipeError
from panax.optim import Optax
from panax.train import StepConfig

BATCH = {"x": np.sin(np.arange(32, dtype=np.float32)).reshape(8, 4)}


def stepping(transformation):
    task = equinox.task(
        lambda key: eqx.nn.Linear(4, 1, key=key), lambda model, batch: jnp.square(jax.vmap(model)(batch["x"])).mean()
    )
    return panax.compile_step(
        task,
        BATCH,
        Optax(transformation=transformation),
        config=StepConfig(clip_norm=None),
        devices=jax.devices()[:1],
    )


def test_a_plateau_schedule_receives_the_loss():
    """The scale falls after a step in which the loss did not, as in a loop of optax's own."""
    transformation = optax.chain(
        optax.sgd(1e-3), optax.contrib.reduce_on_plateau(patience=1, rtol=0.5, accumulation_size=1)
    )
    step = stepping(transformation)
    state = step.init()
    losses, scales = [], []
    for _ in range(5):
        state, metrics = step(state, BATCH)
        losses.append(float(metrics["loss"]))
        scales.append(float(optax.tree.get(state.optimizer_state, "scale")))
    plateau = optax.contrib.reduce_on_plateau(patience=1, rtol=0.5, accumulation_size=1)
    reference = plateau.init(None)
    for loss, scale in zip(losses, scales, strict=True):
        with jax.numpy_dtype_promotion("standard"):
            _, reference = plateau.update(jnp.zeros(()), reference, value=jnp.float32(loss))
        assert float(reference.scale) == pytest.approx(scale)
    assert scales[-1] < 1


def test_a_step_size_from_the_loss():
    step = stepping(optax.polyak_sgd(max_learning_rate=1.0))
    state, metrics = step(step.init(), BATCH)
    _, after = step(state, BATCH)
    assert float(after["loss"]) < float(metrics["loss"])


@pytest.mark.parametrize(
    ("transformation", "name"),
    [
        (optax.lbfgs(), "scale_by_zoom_linesearch needs 'grad' and 'value_fn'"),
        (
            optax.chain(optax.sgd(1.0), optax.scale_by_backtracking_linesearch(5)),
            "scale_by_backtracking_linesearch needs",
        ),
    ],
    ids=["lbfgs", "backtracking"],
)
def test_line_searches_are_refused_by_name(transformation, name):
    with pytest.raises(RecipeError, match=name):
        step = stepping(transformation)
        step(step.init(), BATCH)
