"""`--field.sub value` for any field of a recipe's experiment."""

import dataclasses
import inspect
from collections.abc import Sequence
from typing import Any

import tyro

from ..core import Task
from ..core.errors import RecipeError
from ..run import Experiment
from .recipes import find_recipe
from .usual_names import check_names

SHORT = {"--buckets": "--data.buckets"}
"""Flags that may be written without their path."""


@dataclasses.dataclass(frozen=True)
class _Unsaid(Task):
    """In the place of a task that flags can't say, while they are read."""

    def init(self, key: Any) -> Any: ...

    def loss(self, params: Any, state: Any, batch: Any, key: Any, train: bool) -> Any: ...

    def parameter_axes(self, params: Any) -> Any: ...


HELD = {"task": _Unsaid(), "data": None, "held_out": None}
"""Fields that may hold what no flag can say (another library's model, a loader), and what stands there while flags are read."""


def experiment_from(arguments: Sequence[str], command: str) -> Experiment:
    """The experiment that `RECIPE [--field.sub value ...]` describes; `--help` among them prints its fields and exits.

    Raises:
        RecipeError: There is no such recipe, or a value in it can't be used.
    """
    name, *flags = arguments
    recipe = find_recipe(name)
    try:
        base = recipe()
    except (TypeError, ValueError) as error:
        if isinstance(error, RecipeError):
            raise
        raise RecipeError(f"the recipe {name!r} could not be built: {error}") from error
    if not isinstance(base, Experiment):
        raise RecipeError(f"the recipe {name!r} returned a {type(base).__name__}; expected an Experiment")
    check_names(flags)
    expanded = [replacement for flag in _joined(flags) for replacement in _expand(flag)]
    if any(flag.startswith("--data.buckets") for flag in expanded) and getattr(base.data, "packing", False):
        # Lengths vary only where documents are not packed.
        base = dataclasses.replace(base, data=dataclasses.replace(base.data, packing=False))
    held = {name: value for name in HELD if not _in_words(value := getattr(base, name))}
    found = tyro.cli(
        Experiment,
        default=dataclasses.replace(base, **{field: HELD[field] for field in held}),
        args=expanded,
        prog=f"panax {command} {name}",
        description=inspect.getdoc(recipe),
        config=(tyro.conf.AvoidSubcommands,),
    )
    return dataclasses.replace(found, **held)


def _in_words(value: Any) -> bool:
    """Whether flags can say a value: a configuration, not a loader, a list of batches or an array."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return all(_in_words(getattr(value, field.name)) for field in dataclasses.fields(value))
    if isinstance(value, tuple):
        return all(map(_in_words, value))
    return value is None or isinstance(value, bool | int | float | str)


def _joined(flags: Sequence[str]) -> list[str]:
    """`--mesh auto`, in one word or two, as the flag that it stands for.

    >>> _joined(["--mesh", "auto", "--seed", "1"])
    ['--mesh.auto', '--seed', '1']
    """
    joined: list[str] = []
    for flag in flags:
        if flag == "auto" and joined[-1:] == ["--mesh"]:
            joined[-1] = "--mesh.auto"
        else:
            joined.append("--mesh.auto" if flag == "--mesh=auto" else flag)
    return joined


def _expand(flag: str) -> list[str]:
    name, equals, value = flag.partition("=")
    return [SHORT.get(name, name) + equals + value]
