"""`Agent`: the base of agents, with their environments, rollout lengths and evaluation."""

import abc
import dataclasses
from typing import Any

import jax

from ..core import Batch, CollectingTask, DataFacts, Evaluation, logical_axes
from ..core.errors import RecipeError
from ..core.validation import Validated
from ..environments import Environment, check_environment
from .episodes import Act, evaluation_result, run_episodes


@dataclasses.dataclass(frozen=True, kw_only=True)
class Agent(Validated, CollectingTask):
    """A task that acts in `environments` copies of an environment, and is evaluated by whole episodes.

    Attributes:
        environments: Number of environments, over all devices.
        steps: Steps of each environment in one collection (rollout).
        rollouts_per_step: Collections in one step of the run, which is one call of the compiled program.
        evaluation_episodes: Number of episodes per evaluation.
        evaluation_steps: Maximum number of steps of each of these episodes.
    """

    environment: Environment
    environments: int = 8
    steps: int = 1
    rollouts_per_step: int = 1  # pyright: ignore[reportIncompatibleMethodOverride]
    evaluation_episodes: int = 64
    evaluation_steps: int = 1000

    unit = "environment steps"

    def __post_init__(self) -> None:
        for name in ("environments", "steps", "rollouts_per_step", "evaluation_episodes", "evaluation_steps"):
            if getattr(self, name) < 1:
                raise RecipeError(f"task.{name}={getattr(self, name)}; expected 1 or more")

    @property
    def rows(self) -> int:
        return self.environments

    @property
    def evaluation_rows(self) -> int:
        return self.evaluation_episodes

    @property
    def units_per_row(self) -> int:
        return self.steps * self.rollouts_per_step

    def adapt_to_data(self, facts: DataFacts) -> "Agent":
        check_environment(self.environment, steps=0)
        return self

    def parameter_axes(self, params: Any) -> Any:
        return logical_axes(params)

    @abc.abstractmethod
    def eval_policy(self, params: Any, state: Any, rows: int) -> tuple[Act, Any]:
        """Return the policy that evaluations run in `rows` environments, and its initial memory."""

    @abc.abstractmethod
    def losses(self, params: Any, state: Any, batch: Batch, key: jax.Array) -> Evaluation:
        """Compute the loss and metrics of a minibatch."""

    def loss(self, params: Any, state: Any, batch: Batch, key: jax.Array, train: bool) -> Evaluation:
        if train:
            return self.losses(params, state, batch, key)
        act, memory = self.eval_policy(params, state, batch["row"].shape[0])
        return evaluation_result(
            run_episodes(self.environment, act, memory, batch["row"], key, self.evaluation_steps), state
        )
