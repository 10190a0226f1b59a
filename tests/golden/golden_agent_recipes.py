"""Golden runs of the agents' recipes, made small through their fields."""

import contextlib
import dataclasses
from pathlib import Path

import jax
from rows import Row, rows_of_fit

from panax.run import EvaluateConfig
from panax_recipes.dqn_gridworld import dqn_gridworld
from panax_recipes.ppo_breakout import ppo_breakout
from panax_recipes.ppo_cartpole import ppo_cartpole
from panax_recipes.ppo_pendulum import ppo_pendulum
from panax_recipes.sac_pendulum import sac_pendulum

SMALL_REPLAY = {"rollouts_per_step": 20, "capacity": 512, "warmup": 16, "batch_size": 16}
SMALL_ROLLOUTS = {"environments": 8, "steps": 16, "rollouts_per_step": 2, "epochs": 2, "minibatches": 2}
RECIPES = {
    "dqn_gridworld": (dqn_gridworld, SMALL_REPLAY),
    "sac_pendulum": (sac_pendulum, SMALL_REPLAY),
    "ppo_cartpole": (ppo_cartpole, SMALL_ROLLOUTS),
    "ppo_pendulum": (ppo_pendulum, SMALL_ROLLOUTS),
    "ppo_breakout": (ppo_breakout, SMALL_ROLLOUTS),
}


def run(name: str, folder: Path) -> list[Row]:
    recipe, sizes = RECIPES[name]
    experiment = recipe()
    task = dataclasses.replace(experiment.task, **sizes, evaluation_episodes=4, evaluation_steps=20)
    experiment = dataclasses.replace(
        experiment,
        task=task,
        num_steps=3,
        hooks=(),
        evaluate=EvaluateConfig(every=0),
        log_every=1,
        directory=str(folder / "run"),
    )
    with contextlib.ExitStack() as stack:
        if name == "ppo_breakout":
            # gymnax mixes dtypes and ranks.
            stack.enter_context(jax.numpy_dtype_promotion("standard"))
            stack.enter_context(jax.numpy_rank_promotion("allow"))
        return rows_of_fit(experiment)
