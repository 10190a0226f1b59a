"""`Film`: a hook that shows an episode played by the current agent, drawn by its environment."""

import dataclasses
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ..core.errors import RecipeError, describe_type
from ..core.validation import Validated
from ..environments import Environment, EnvironmentBatch
from ..environments.batch import row_keys
from ..hooks import Hook, RunView
from ..job.agreement import is_process_zero
from ..metrics.film import Frames, encode_animated_png
from .agent import Agent
from .episodes import Act

_MAX_STEPS = 10_000


@dataclasses.dataclass
class Film(Hook, Validated):
    """Hook that plays an episode after each evaluation, and logs it as a film: TensorBoard plays it, other
    trackers show a sheet of frames.

    The film is also written to `films/step_NUMBER.png` in the run's folder: an animated PNG, which browsers
    play.

    Attributes:
        max_steps: Maximum length of a film, in steps.
        seed: Seed of the episode.
    """

    max_steps: int = 500
    seed: int = 0

    def __post_init__(self) -> None:
        if not 1 <= self.max_steps <= _MAX_STEPS:
            raise RecipeError(f"Film.max_steps={self.max_steps}; expected 1 to {_MAX_STEPS}")

    def before_run(self, run: RunView) -> None:
        task = run.experiment.task
        if not isinstance(task, Agent):
            raise RecipeError(f"Film shows episodes of one agent, but the task is {describe_type(task)}; remove Film")
        environment = task.environment
        if type(environment).render is Environment.render or _first_frame(environment) is None:
            raise RecipeError(
                f"{type(environment).__name__} does not render images, so Film has nothing to record; remove Film"
            )
        if jax.process_count() > 1:
            raise RecipeError("Film plays in runs of one process; remove it from this job")
        self._play = _player(task, self.max_steps)

    def after_evaluation(self, run: RunView, evaluation: Any) -> None:
        task, state = run.experiment.task, run.state
        states = self._play(state.eval_params, state.model_state, jax.random.key(self.seed))
        frames = render_frames(task.environment, *jax.device_get(states))
        seconds = task.environment.seconds_per_frame
        run.film("episode", frames, seconds)
        if is_process_zero():
            path = Path(run.experiment.folder) / "films" / f"step_{run.step:08d}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(encode_animated_png(frames, seconds))


def render_frames(environment: Environment, states: Any, steps: np.ndarray) -> Frames:
    """Draw the frames of an episode.

    Args:
        states: States from the first one on; every leaf has a leading axis of time.
        steps: Number of steps of the episode.
    """
    drawn = [environment.render(jax.tree.map(lambda leaf, at=at: leaf[at], states)) for at in range(int(steps) + 1)]
    return np.stack([frame for frame in drawn if frame is not None])


def _player(task: Any, max_steps: int) -> Any:
    """Return a compiled function that plays one episode and returns its states and its number of steps."""
    environment: Environment = task.environment

    def play(params: Any, model_state: Any, key: jax.Array) -> tuple[Any, jax.Array]:
        act, memory = task.eval_policy(params, model_state, 1)
        return rollout_states(environment, act, memory, key, max_steps)

    return jax.jit(play)


def rollout_states(
    environment: Environment, act: Act, memory: Any, key: jax.Array, max_steps: int
) -> tuple[Any, jax.Array]:
    """Return the states of one episode of at most `max_steps` steps, and its number of steps; states after the
    end of the episode repeat its last state."""
    batch, row = EnvironmentBatch(environment), jnp.zeros(1, jnp.int32)
    first = batch.reset(key, row)

    def step(carry: tuple[Any, ...], number: jax.Array) -> tuple[tuple[Any, ...], Any]:
        ongoing, memory, last, playing, steps = carry
        act_key, move_key = jax.random.split(jax.random.fold_in(key, number + 1))
        memory, action = act(memory, ongoing.observation, row_keys(act_key, row))
        moved = jax.vmap(environment.step)(ongoing.state, action, row_keys(move_key, row))
        state = jax.tree.map(lambda new, old: jnp.where(playing, new, old), moved.state, last)
        after = dataclasses.replace(ongoing, state=moved.state, observation=moved.observation)
        playing_on = playing & ~(moved.terminated | moved.truncated)[0]
        return (after, memory, state, playing_on, steps + playing.astype(jnp.int32)), state

    initial = (first, memory, first.state, jnp.bool_(True), jnp.int32(0))
    (*_, steps), states = jax.lax.scan(step, initial, jnp.arange(max_steps))
    every = jax.tree.map(lambda one, rest: jnp.concatenate([one[None], rest])[:, 0], first.state, states)
    return every, steps


def _first_frame(environment: Environment) -> Any:
    state, _ = environment.reset(jax.random.key(0))
    return environment.render(jax.device_get(state))
