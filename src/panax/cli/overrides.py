"""Flags `--field.sub value` for any field of a recipe's experiment."""

import dataclasses
import inspect
import textwrap
from collections.abc import Mapping, Sequence
from typing import Any, cast

from ..core import Task
from ..core.errors import PanaxError, RecipeError, describe_type, suggest_name
from ..metrics.console import wrap_line
from ..models import DecoderObjective, DecoderTask, Kto, LoRA, Preference
from ..models.objectives.preference_losses import PREFERENCE_LOSSES, PreferenceLoss
from ..optim import AdamW
from ..presets.experiments import preset
from ..presets.released_model import adapted_model, released_model
from ..run import Experiment, replace_data
from ..run.blank_data import find_missing_data
from ..run.folder.addresses import ADAPTER_PREFIX, RELEASED_PREFIX
from .failures import warn
from .flag_aliases import check_names
from .recipes import PRESET, built_in_recipes, find_recipe, format_recipe_error
from .settings import read_settings

DATA = "--data"
"""Flag that takes paths, up to the next flag."""

LORA = "--lora"

PREFERENCE = "--preference"

KTO = "kto"
"""The method of answers that are each labeled good or bad."""

PREFERENCE_ALIASES = {"dpo": "sigmoid"}
"""Names of methods, with those of their losses."""

PREFERENCE_RATE = 1e-6
"""Peak learning rate of a released model's preferences; ten times that for adapters."""

SHORT_FLAGS = {"--buckets": "--data.buckets", "--tasks": "--questions.files", "--tasks-every": "--questions.every"}
"""Flags that may be written without their path."""


@dataclasses.dataclass(frozen=True)
class _UnparsedTask(Task):
    """Placeholder for a task that flags can't express, while flags are read."""

    def init(self, key: Any) -> Any: ...

    def loss(self, params: Any, state: Any, batch: Any, key: Any, train: bool) -> Any: ...

    def parameter_axes(self, params: Any) -> Any: ...


UNPARSED_FIELDS = {"task": _UnparsedTask(), "data": None, "held_out": None, "hooks": (), "trackers": ()}
"""Fields that may have values that flags can't express (another library's model, a loader), and their
placeholders while flags are read."""


def asks_for_help(arguments: Sequence[str], command: str, command_flags: str) -> bool:
    """Print a command's help if it is requested without a recipe; return True if it was.

    Args:
        command_flags: The command's own flags, one line each.
    """
    if arguments[:1] not in (["-h"], ["--help"]):
        return False
    choices = (
        f"RECIPE is one of {', '.join(sorted(built_in_recipes()))}; a published model, preset:NAME (`panax recipes` "
        "lists them); released weights, hf:DIR or hf:ORG/NAME; an adapter in PEFT's layout, peft:DIR; or a "
        f"Python file of yours."
    )
    print(
        f"usage: panax {command} RECIPE [flags] [--field.sub value ...]\n\n{textwrap.fill(choices, 79)}\n\n{command_flags}\n"
        f"Every setting of a recipe is a flag: `panax {command} RECIPE --help` lists\nthem with their defaults."
    )
    return True


def experiment_from(arguments: Sequence[str], command: str) -> Experiment:
    """Build the experiment of `RECIPE [--field.sub value ...]`; `--help` among the arguments prints its fields
    and exits.

    Raises:
        RecipeError: The recipe does not exist, or a value is invalid.
    """
    name, *flags = arguments
    flags, paths = _without_data(flags)
    flags, rank = _without_lora(flags)
    flags, loss = _without_preference(flags)
    recipe = find_recipe(name)
    try:
        base = _published(name, paths, flags, rank) or recipe()
    except PanaxError:
        raise
    except Exception as error:
        raise RecipeError(
            f"the recipe {name!r} could not be built: {format_recipe_error(error, inspect.getsourcefile(recipe) or '')}"
        ) from error
    if not isinstance(base, Experiment):
        raise RecipeError(f"the recipe {name!r} returned {describe_type(base)}; expected `return Experiment(...)`")
    if rank is not None and name.startswith(ADAPTER_PREFIX):
        raise RecipeError(f"{LORA} is for models without adapters, and {name} has one of its own rank; leave it out")
    if rank is not None and not name.startswith(RELEASED_PREFIX):
        base = _with_adapters(base, rank)
    if loss is not None:
        base = _with_preference(base, loss, released=name.startswith((RELEASED_PREFIX, ADAPTER_PREFIX)))
    if paths and not name.startswith((PRESET, RELEASED_PREFIX, ADAPTER_PREFIX)):
        base = replace_data(base, *paths)
    check_names(flags)
    if command in ("train", "data show") and "--help" not in flags and (absent := find_missing_data(base)) is not None:
        raise absent.missing_data_error()
    expanded = [replacement for flag in _expand_mesh_auto(flags) for replacement in _expand(flag)]
    if any(flag.startswith("--data.buckets") for flag in expanded) and getattr(base.data, "packing", False):
        # Lengths only vary if documents are not packed.
        base = dataclasses.replace(base, data=dataclasses.replace(base.data, packing=False))
    if "--help" in flags or "-h" in flags:
        # In paragraphs, which tyro would merge.
        for line in (inspect.getdoc(recipe) or "").splitlines():
            print(wrap_line(line))
        print()
    return _read_flags(base, expanded, f"panax {command} {name}")


def change_settings(experiment: Experiment, settings: Sequence[str], command: str) -> Experiment:
    """Return an experiment with other values of its settings.

    Args:
        settings: Each as "SETTING=VALUE", such as "step.clip_norm=0.5".

    Raises:
        RecipeError: A setting is unknown, or its value is invalid.
    """
    for each in settings:
        if "=" not in each or each.startswith("-"):
            raise RecipeError(f"{each!r} is not a setting; expected SETTING=VALUE, such as step.clip_norm=0.5")
    flags = [f"--{each}" for each in settings]
    check_names(flags)
    return _read_flags(experiment, flags, command)


def _read_flags(base: Experiment, flags: Sequence[str], prog: str) -> Experiment:
    """Read flags over an experiment of which some fields may hold values that flags can't express."""
    unparsed_values = {name: value for name in UNPARSED_FIELDS if not _is_expressible(value := getattr(base, name))}
    stand_ins = dataclasses.replace(base, **{field: UNPARSED_FIELDS[field] for field in unparsed_values})
    return dataclasses.replace(read_settings(stand_ins, flags, prog), **unparsed_values)


def _published(name: str, paths: Sequence[str], flags: Sequence[str], rank: int | None) -> Experiment | None:
    """Return the experiment of a published model with the data at `paths`; None if `name` is another recipe."""
    if name.startswith(PRESET):
        return preset(name.removeprefix(PRESET), data=paths or None, init=_value_of("--init", flags), say=warn)
    if name.startswith(RELEASED_PREFIX):
        return released_model(name.removeprefix(RELEASED_PREFIX), data=list(paths) or None, lora=rank, say=warn)
    if name.startswith(ADAPTER_PREFIX):
        return adapted_model(name.removeprefix(ADAPTER_PREFIX), data=list(paths) or None, say=warn)
    return None


def _with_adapters(experiment: Experiment, rank: int) -> Experiment:
    """Return an experiment that trains adapters of this rank alongside a decoder's matrices."""
    if not isinstance(experiment.task, DecoderTask):
        raise RecipeError(
            f"{LORA} adds adapters to decoders, and {experiment.name} trains a {describe_type(experiment.task)}"
        )
    return dataclasses.replace(experiment, task=dataclasses.replace(experiment.task, adapter=LoRA.of_rank(rank)))


def _with_preference(experiment: Experiment, loss: str, *, released: bool) -> Experiment:
    """Return an experiment that learns from pairs of answers by a loss."""
    task = experiment.task
    if not isinstance(task, DecoderTask):
        raise RecipeError(f"{PREFERENCE} is for decoders, and {experiment.name} trains a {describe_type(task)}")
    task = dataclasses.replace(task, objective=_preference_objective(PREFERENCE_ALIASES.get(loss, loss)))
    optimizer = experiment.optimizer
    if released and isinstance(optimizer, AdamW):
        peak = PREFERENCE_RATE if task.adapter is None else 10 * PREFERENCE_RATE
        optimizer = dataclasses.replace(optimizer, schedule=dataclasses.replace(optimizer.schedule, peak=peak))
    return dataclasses.replace(experiment, task=task, optimizer=optimizer)


def _preference_objective(loss: str) -> DecoderObjective:
    """Return the objective of a loss of pairs, or that of labeled answers."""
    if loss == KTO:
        return Kto()
    if loss not in PREFERENCE_LOSSES:
        raise RecipeError(f"{PREFERENCE} {loss or 'without a loss'}; {suggest_name(loss, [*PREFERENCE_LOSSES, KTO])}")
    smoothing = 1e-3 if loss == "exo_pair" else 0.0
    return Preference(loss=cast(PreferenceLoss, loss), label_smoothing=smoothing)


def _without_preference(flags: Sequence[str]) -> tuple[list[str], str | None]:
    """Return the flags without `--preference LOSS`, and the loss; None if there is none.

    >>> _without_preference(["--seed", "1", "--preference", "dpo"]), _without_preference([])
    ((['--seed', '1'], 'dpo'), ([], None))
    """
    for index, flag in enumerate(flags):
        if flag.partition("=")[0] == PREFERENCE:
            count = 1 if "=" in flag else 2
            return [*flags[:index], *flags[index + count :]], _value_of(PREFERENCE, flags)
    return list(flags), None


def _without_lora(flags: Sequence[str]) -> tuple[list[str], int | None]:
    """Return the flags without `--lora RANK`, and the rank; None if there is none.

    >>> _without_lora(["--seed", "1", "--lora", "16"]), _without_lora(["--lora=8"]), _without_lora([])
    ((['--seed', '1'], 16), ([], 8), ([], None))
    """
    value = _value_of(LORA, flags)
    remaining = list(flags)
    for index, flag in enumerate(flags):
        if flag.partition("=")[0] == LORA:
            del remaining[index : index + (1 if "=" in flag else 2)]
            if not value.isdecimal() or int(value) < 1:
                raise RecipeError(
                    f"{LORA} {value or 'without a number'}; expected the rank of the adapters, such as {LORA} 16"
                )
            return remaining, int(value)
    return remaining, None


def _without_data(flags: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return the flags without `--data PATH...`, and the paths.

    >>> _without_data(["--seed", "1", "--data", "a.txt", "b", "--data=c", "--name", "x"])
    (['--seed', '1', '--name', 'x'], ['a.txt', 'b', 'c'])
    """
    remaining: list[str] = []
    paths: list[str] = []
    taking = False
    for flag in flags:
        if flag == DATA or flag.startswith(f"{DATA}="):
            taking = flag == DATA
            path = flag.removeprefix(DATA)[1:]
            paths += [path] if path else []
        elif taking and not flag.startswith("--"):
            paths.append(flag)
        else:
            if taking and not paths:
                break
            taking = False
            remaining.append(flag)
    if not paths and any(flag.partition("=")[0] == DATA for flag in flags):
        raise RecipeError("expected paths after --data: files, folders or globs")
    return remaining, paths


def _value_of(name: str, flags: Sequence[str]) -> str:
    """Return the last value of a flag; empty if it is missing."""
    value = ""
    for flag, next_flag in zip(flags, [*flags[1:], ""]):
        if flag == name:
            value = next_flag
        elif flag.startswith(f"{name}="):
            value = flag.partition("=")[2]
    return value


def _is_expressible(value: Any) -> bool:
    """Return True if flags can express a value, such as a configuration; False for a loader, a list of batches
    or an array."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        saved = [field.name for field in dataclasses.fields(value) if field.metadata.get("saved", True)]
        return all(_is_expressible(getattr(value, name)) for name in saved)
    if isinstance(value, tuple):
        return all(map(_is_expressible, value))
    if isinstance(value, Mapping):
        return all(isinstance(leaf, bool | int | float | str) for leaf in (*value, *value.values()))
    return value is None or isinstance(value, bool | int | float | str)


def _expand_mesh_auto(flags: Sequence[str]) -> list[str]:
    """Replace `--mesh auto` and `--mesh=auto` by `--mesh.auto`.

    >>> _expand_mesh_auto(["--mesh", "auto", "--seed", "1"])
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
    return [SHORT_FLAGS.get(name, name) + equals + value]
