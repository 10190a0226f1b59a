"""Values by module in PEFT's configs: `rank_pattern` and `alpha_pattern`, which are regular expressions there.

A file's expressions are not run as they are: some take time without bound. Names, `.`, `.*`, `\\d+`, `^` and `$` are read.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from ....core.errors import RecipeError

MAX_PATTERNS = 10_000
MAX_LENGTH = 200
"""Maximum length of a pattern."""

_PIECE = re.compile(r"[A-Za-z0-9_-]+|\.\*|\\\.|\.|\\d\+|\\d|\^|\$")
_MAX_REPEATS = 3
"""Maximum number of `.*` and `\\d+` in one pattern, so that matching takes at most the fourth power of a name's length."""


def read_patterns(value: Any, where: str) -> dict[str, float]:
    """Check a mapping of patterns to numbers, and return it; empty for none.

    Raises:
        RecipeError: It is something else, or a pattern is an expression that is not read.

    >>> read_patterns({"q_proj": 8}, "a file")
    {'q_proj': 8}
    """
    if not value:
        return {}
    numbers = isinstance(value, Mapping) and all(
        isinstance(number, int | float) and not isinstance(number, bool) for number in value.values()
    )
    if not isinstance(value, Mapping) or not numbers or len(value) > MAX_PATTERNS:
        raise RecipeError(f"{where}={str(value)[:100]}; expected at most {MAX_PATTERNS} patterns with a number each")
    for pattern in value:
        rest, repeats = _PIECE.sub("", pattern), len(re.findall(r"\.\*|\\d\+", pattern))
        if rest or repeats > _MAX_REPEATS or len(pattern) > MAX_LENGTH:
            raise RecipeError(
                f"{where} has the pattern {pattern[:MAX_LENGTH]!r}; expected a module's name or its end, with at most "
                f"{_MAX_REPEATS} of `.*` and `\\d+`: name the modules, or merge the adapter by PEFT"
            )
    return dict(value)


def values_in_layers(
    patterns: Mapping[str, float], modules: Mapping[str, Sequence[str]], where: str
) -> dict[str, float]:
    """Return the value of each matrix of a layer that a pattern matches, as PEFT matches its modules.

    Args:
        modules: The modules that a matrix is in the files, by its name in a layer.

    Raises:
        RecipeError: Layers have different values, or a pattern matches no module.

    >>> values_in_layers({"q_proj": 8}, {"attention.w_q": ["a.0.q_proj", "a.1.q_proj"], "attention.w_k": ["a.0.k_proj"]}, "")
    {'attention.w_q': 8}
    """
    expressions = {pattern: re.compile(rf"(.*\.)?({pattern})$") for pattern in patterns}
    values: dict[str, float] = {}
    used: set[str] = set()
    for matrix, names in modules.items():
        matching = [[pattern for pattern, each in expressions.items() if each.match(name)] for name in names]
        used.update(*matching)
        # The first pattern that matches counts.
        distinct = {patterns[matched[0]] if matched else None for matched in matching}
        if len(distinct) > 1:
            raise RecipeError(
                f"{where}: {names[0]} and other layers have different ranks or alphas ({distinct}); layers of one stack share "
                f"them: merge the adapter by PEFT"
            )
        if (value := distinct.pop()) is not None:
            values[matrix] = value
    if unused := patterns.keys() - used:
        raise RecipeError(f"{where}: {min(unused)!r} matches no module of this model")
    return values
