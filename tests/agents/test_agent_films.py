"""An episode is filmed after an evaluation: its frames are those of the states that the agent went through."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from agents.tiny_environments import Endless

import panax
from panax.agents import Dqn, Film
from panax.agents.film import render_frames, rollout_states
from panax.core.errors import RecipeError
from panax.environments import GridWorld
from panax.metrics import Tracker
from panax.run import EvaluateConfig, Experiment

TASK = Dqn(
    environment=GridWorld(maze=("S.G",), max_steps=4), environments=4, rollouts_per_step=2, batch_size=16, capacity=64, warmup=8,
    evaluation_episodes=2, evaluation_steps=4,
)  # fmt: skip


def test_states_are_those_of_one_episode():
    def right(memory, observation, keys):
        return memory, jnp.ones(1, jnp.int32)

    world = GridWorld(maze=("S..G",), max_steps=9)
    states, steps = jax.jit(lambda: rollout_states(world, right, (), jax.random.key(0), 6))()
    assert int(steps) == 3 and np.asarray(states.cell).tolist() == [0, 1, 2, 3, 3, 3, 3]
    frames = render_frames(world, jax.device_get(states), np.asarray(steps))
    assert frames.shape == (4, 16, 64, 3)
    # The walker stands in one cell of each frame, and goes to the right.
    blue = (frames == (50, 110, 180)).all(-1).any(1)
    assert [int(np.flatnonzero(row).mean()) // 16 for row in blue] == [0, 1, 2, 3]


@pytest.mark.slow
def test_a_run_logs_films_and_keeps_them(tmp_path):
    films, one = [], jax.devices()[:1]

    class Taken(Tracker):
        def record(self, step, values):
            pass

        def film(self, step, name, frames, seconds_per_frame):
            films.append((step, name, frames.shape[1:], seconds_per_frame))

    experiment = Experiment(
        task=TASK, num_steps=2, hooks=(Film(max_steps=3),), directory=str(tmp_path), evaluate=EvaluateConfig(every=1)
    )
    panax.fit(experiment, quiet=True, trackers=(Taken(),), devices=one)
    assert films[0] == (1, "episode", (16, 48, 3), 0.2) and films[-1][0] == 2
    assert (tmp_path / "films" / "step_00000001.png").read_bytes().startswith(b"\x89PNG")
    other = dataclasses.replace(TASK, environment=Endless())
    with pytest.raises(RecipeError, match="Endless does not render images"):
        panax.fit(
            dataclasses.replace(experiment, task=other, directory=str(tmp_path / "none")), quiet=True, devices=one
        )
