"""The recipes that learn from a replay buffer, and Breakout's, reach the figures of their pages."""

import sys

import jax
import numpy as np
import pytest

from panax.core import CollectingTask
from panax.environments import GridWorld
from panax.mesh import MeshShape, Placement
from panax.run import Experiment
from panax.train import CompiledStep, Program
from panax_recipes.dqn_gridworld import dqn_gridworld
from panax_recipes.ppo_breakout import ppo_breakout
from panax_recipes.sac_pendulum import sac_pendulum

pytestmark = pytest.mark.slow


def trained_return(experiment: Experiment, seed: int) -> float:
    task = experiment.task
    assert isinstance(task, CollectingTask)
    program = Program.create(task, experiment.optimizer, num_steps=experiment.num_steps, config=experiment.step)
    placement = Placement.create(MeshShape(), devices=jax.devices()[:1])
    step = CompiledStep(program, placement, {"row": ("batch",)})
    state, batch = step.init(seed), step.put({"row": np.arange(task.rows, dtype=np.int32)})
    for _ in range(experiment.num_steps):
        state, _ = step(state, batch)
    rows = step.put({"row": np.arange(task.evaluation_rows, dtype=np.int32)})
    return float(step.evaluate(state, rows)["metrics"]["return"].value)


@pytest.mark.parametrize("seed", range(3))
def test_dqn_finds_the_shortest_way(seed):
    assert trained_return(dqn_gridworld(), seed) == pytest.approx(GridWorld().optimal_return(), abs=1e-5)


def test_sac_swings_the_pendulum_up():
    experiment = sac_pendulum()
    task = experiment.task
    assert isinstance(task, CollectingTask)
    assert task.rows * task.units_per_row * experiment.num_steps <= 1_000_000
    assert trained_return(experiment, 0) >= -200


@pytest.mark.skipif(
    sys.version_info >= (3, 12), reason="gymnax is for jax below 0.12, which the tests have on Python 3.11"
)
def test_ppo_plays_breakout():
    """PureJaxRL's code reached 20.9 after as many steps here."""
    # gymnax mixes dtypes and ranks.
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        assert trained_return(ppo_breakout(), 0) >= 18
