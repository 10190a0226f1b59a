"""The run of the fault matrix: a small decoder on real text, which fails at the place in `PANAX_TEST_FAULT`."""

import dataclasses
import os
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import optax

sys.path.insert(0, str(Path(__file__).parents[2]))
sys.path.insert(0, str(Path(__file__).parent))

from injected import HeldTask, fault_of_this_process, hold_optimizer, install
from tiny_recipe import tiny

from panax import Experiment
from panax.checkpoint import CheckpointConfig
from panax.hooks import Hook
from panax.optim import Optax
from panax.run import EvaluateConfig

STEPS, STOP = 24, "PANAX_TEST_STOP"


def held() -> optax.GradientTransformation:
    """The gradients as they are, after their norm has gone through hold.c."""

    def update(updates, state, params=None):
        del params
        norm = hold_optimizer(jnp.asarray(optax.global_norm(updates), jnp.float32))
        one = jnp.where(norm >= 0.0, 1.0, 2.0)
        return jax.tree.map(lambda update: update * one.astype(update.dtype), updates), state

    return optax.GradientTransformation(lambda params: optax.EmptyState(), update)


@dataclasses.dataclass
class Ends(Hook):
    """Stops the run after the step that the environment names, and is where it fails in its teardown."""

    def after_step(self, run) -> None:
        if run.step == int(os.environ.get(STOP, "0")):
            run.stop("as planned")

    def at_end(self, run) -> None:
        if (fault := fault_of_this_process()) is not None and fault.phase == "teardown" and run.step == STEPS:
            fault.reach()


def matrix() -> Experiment:
    recipe = tiny()
    experiment = dataclasses.replace(
        recipe,
        name="matrix",
        task=HeldTask(model=recipe.task.model),
        data=dataclasses.replace(recipe.data, batch_size=12),
        optimizer=Optax(transformation=optax.chain(held(), optax.adamw(3e-3))),
        num_steps=STEPS,
        hooks=(Ends(),),
        evaluate=EvaluateConfig(every=0),
        checkpoint=CheckpointConfig(every=4, keep_last=99, keep_best=0),
        log_every=1,
    )
    if (fault := fault_of_this_process()) is not None:
        install(fault)
    return experiment
