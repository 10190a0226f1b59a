"""`Reward`: a function that rates one answer, as a setting that files can describe."""

import dataclasses
import inspect
import os
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import NamedTuple, Protocol

from ...core.errors import RecipeError
from ...core.validation import Validated

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
            prompt's record of JSON values, with the prompt itself as `record["prompt"]`.
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
        where = self.function if isinstance(self.function, str) else locate_function(self.function)
        split_location(where)
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


def split_location(where: str) -> tuple[str, str]:
    """Split the location of a function into its module or file, and its name.

    Raises:
        RecipeError: The text has another form.

    >>> split_location("rewards/sums.py:is_right")
    ('rewards/sums.py', 'is_right')
    """
    source, _, name = where.rpartition(":")
    is_module = all(part.isidentifier() for part in source.split("."))
    if not name.isidentifier() or not (is_module or (source.endswith(".py") and len(source) > 3)):
        raise RecipeError(f"Reward.function={where!r}: expected 'module:function' or 'folder/file.py:function'")
    return source, name


def locate_function(function: Callable[..., float]) -> str:
    """Return the location from which another process can import a function: its module if that can be found by
    name, its file otherwise.

    The path of a file is relative to the working directory if the file is inside it.

    Raises:
        RecipeError: It is not a function at the top level of a module or a script: a lambda, a nested function, a
            method, an object, or a function of an interactive session.

    >>> locate_function(re.escape)
    're:escape'
    """
    name = getattr(function, "__qualname__", "")
    module = sys.modules.get(getattr(function, "__module__", None) or "")
    if not inspect.isroutine(function) or not name.isidentifier() or module is None:
        raise RecipeError(_describe_misplaced(function, "another process can't import it"))
    if getattr(module, name, None) is not function:
        raise RecipeError(_describe_misplaced(function, f"{module.__name__}.{name} is another object, or missing"))
    module_name = _importable_name(module)
    if module_name is not None:
        return f"{module_name}:{name}"
    file = getattr(module, "__file__", None)
    if file is None or not file.endswith(".py") or not Path(file).is_file():
        raise RecipeError(_describe_misplaced(function, "another process can't import an interactive session"))
    path = os.path.abspath(file)
    relative = os.path.relpath(path)
    return f"{path if relative.startswith(os.pardir) else relative}:{name}"


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


def _importable_name(module: ModuleType) -> str | None:
    """Return the name by which a fresh process with this `sys.path` imports the same file; None if there is none."""
    spec = getattr(module, "__spec__", None)
    # A program that `python -m` runs is called `__main__`, and its spec has its name.
    name = module.__name__ if module.__name__ != "__main__" else getattr(spec, "name", None)
    if name is None or name == "__main__":
        return None
    parent = sys.modules.get(name.rpartition(".")[0])
    path = getattr(parent, "__path__", None) if "." in name else None
    if "." in name and path is None:
        return None
    # `importlib.util.find_spec` would return the spec of the loaded module, which may come from anywhere.
    for finder in sys.meta_path:
        candidate = finder.find_spec(name, path)
        if candidate is not None:
            file = getattr(module, "__file__", None)
            same = file is None or (
                candidate.origin is not None and os.path.realpath(candidate.origin) == os.path.realpath(file)
            )
            return name if same else None
    return None


def _describe_misplaced(function: object, reason: str) -> str:
    name = getattr(function, "__qualname__", type(function).__name__)
    return (
        f"Reward.function={name}: {reason}; expected a function that is defined by `def` at the top level of a module or "
        f"a script: move it there, or name it as 'module:function' or 'folder/file.py:function'"
    )
