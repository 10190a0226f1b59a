"""`Reward`: a function that rates one answer, as a setting that files can describe."""

import dataclasses
import re
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

from ...core.errors import RecipeError
from ...core.validation import Validated
from ..calls.location import resolve_location, split_location

_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*")


class Verdict(NamedTuple):
    """Result of one reward function for one answer.

    Attributes:
        value: The reward; None if the function failed.
        error: Reward and reason of a failure, as text; empty otherwise.
    """

    value: float | None
    error: str = ""


class WeightedReward(Protocol):
    """A reward with the factor of its value in the sum of all."""

    @property
    def weight(self) -> float: ...


@dataclasses.dataclass(frozen=True, kw_only=True)
class Reward(Validated):
    """A reward function with its weight and its time limit.

    Attributes:
        function: `f(answer: str, record: Mapping[str, Any]) -> float`, defined at the top level of a module or a
            script, or its location as text: "module:name" or "folder/file.py:name". Stored as text. `record` is the
            prompt's record of JSON values, with the prompt itself as `record["prompt"]`. With a third parameter
            `episode`, it gets the whole conversation of an answer of several turns too; see `TextEnvironment`.
        weight: Factor of the value in the sum of all rewards. 0 only reports the value, and a negative weight
            makes a penalty.
        name: Name in metrics and messages; by default that of the function.
        seconds: Time limit of one call.

    >>> Reward(function="math:fsum").name
    'fsum'
    """

    function: Callable[..., float] | str
    weight: float = 1.0
    name: str = ""
    seconds: float = 10.0

    def __post_init__(self) -> None:
        where = resolve_location(self.function, "Reward.function")
        object.__setattr__(self, "function", where)
        object.__setattr__(self, "name", self.name or split_location(where)[1])
        check_name("Reward", self.name)
        if self.seconds <= 0:
            raise RecipeError(f"Reward.seconds={self.seconds:g}: expected a positive number")

    @property
    def location(self) -> str:
        """Return the function's location: "module:name" or "file.py:name"."""
        assert isinstance(self.function, str)
        return self.function


def check_name(kind: str, name: str) -> None:
    """Check the name of a reward.

    Args:
        kind: The class of the setting, for the message.

    Raises:
        RecipeError: Metrics can't have this name.
    """
    if _NAME.fullmatch(name) is None:
        raise RecipeError(
            f"{kind}.name={name!r}: expected letters, digits, '_', '-' and '.', since metrics have this name"
        )


def weigh_verdicts(rewards: Sequence[WeightedReward], verdicts: Sequence[Verdict]) -> float | None:
    """Return the weighted sum of an answer's rewards; None if one of them failed.

    Args:
        verdicts: One for each reward, in their order.

    >>> rewards = [Reward(function="math:fsum"), Reward(function="math:prod", weight=0.5)]
    >>> weigh_verdicts(rewards, [Verdict(1.0), Verdict(3.0)])
    2.5
    """
    total = 0.0
    for reward, verdict in zip(rewards, verdicts, strict=True):
        if verdict.value is None:
            return None
        total += reward.weight * verdict.value
    return total
