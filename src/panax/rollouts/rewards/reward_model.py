"""`RewardModel`: a trained model that rates answers, as a reward of rollouts."""

import dataclasses
import math
from collections.abc import Sequence

from ...core.errors import RecipeError
from ...core.validation import Validated
from .reward import Reward, Verdict, check_name


@dataclasses.dataclass(frozen=True, kw_only=True)
class RewardModel(Validated):
    """A reward model with its weight: the checkpoint of a run with `panax.models.RewardTask`.

    It reads the tokens of a prompt and its answer, with the one that ended it, on the run's mesh.

    Attributes:
        run: A run's folder (its best checkpoint), or a checkpoint's folder or address. Its tokenizer must be
            `data.tokenizer`.
        weight: Factor of the value in the sum of all rewards. 0 only reports the value.
        name: Name in metrics and messages.

    >>> RewardModel(run="runs/reward_quickstart").name
    'reward_model'
    """

    run: str
    weight: float = 1.0
    name: str = "reward_model"

    def __post_init__(self) -> None:
        if not self.run:
            raise RecipeError("RewardModel.run is empty; expected the folder of a run with RewardTask, or a checkpoint")
        if not math.isfinite(self.weight):
            raise RecipeError(f"RewardModel.weight={self.weight:g}: expected a finite number")
        check_name("RewardModel", self.name)


def merge_verdicts(
    rewards: Sequence[Reward | RewardModel], functions: Sequence[Verdict], models: Sequence[float]
) -> list[Verdict]:
    """Return the verdicts of one answer in the order of the rewards; a value of a model that is not finite is a failure.

    Args:
        functions: Verdicts of the rewards that are functions, in their order.
        models: Values of those that are models, in their order.

    >>> rewards = [RewardModel(run="runs/judge"), Reward(function="math:fsum")]
    >>> [verdict.value for verdict in merge_verdicts(rewards, [Verdict(2.0)], [1.5])]
    [1.5, 2.0]
    """
    by_function, by_model = iter(functions), iter(models)
    return [next(by_function) if isinstance(reward, Reward) else _accept(reward, next(by_model)) for reward in rewards]


def _accept(reward: RewardModel, value: float) -> Verdict:
    return (
        Verdict(value)
        if math.isfinite(value)
        else Verdict(None, f"reward {reward.name} of {reward.run} returned {value}")
    )
