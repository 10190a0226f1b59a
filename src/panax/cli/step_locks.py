"""`panax inspect --lock` and `--check`: the cost of a step as a file, and its changes."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax

from ..core.errors import DataError, RecipeError
from ..metrics.console import wrap_line
from ..plan import walk_step
from ..plan.lock.changes import describe_changes
from ..plan.lock.step_lock import StepLock, lock_step
from ..system import json_reader
from ..train import CompiledStep
from .recipes import PRESET, built_in_recipes

CHANGED = 6
"""Exit code of a check that finds a change."""


def read_lock(path: str) -> StepLock:
    """Read a lock.

    Raises:
        DataError: It can't be read, or holds something else.
    """
    try:
        with open(path, "rb") as file:
            # The reader refuses a longer text.
            text = file.read(json_reader.MAX_BYTES + 1)
    except OSError as error:
        raise DataError(
            f"can't read the lock {path}: {error.strerror or error}; write it with `panax inspect RECIPE --lock {path}`"
        ) from error
    return StepLock.from_json(text, path)


def locked_arguments(path: str) -> list[str]:
    """Return the recipe and flags that a lock was written with, to trace the same step again.

    Raises:
        DataError: It can't be read, or holds something else.
        RecipeError: Its recipe is not of Panax, so that a file would decide which code runs.
    """
    lock = read_lock(path)
    if not lock.recipe.startswith(PRESET) and lock.recipe not in built_in_recipes():
        raise RecipeError(
            f"{path} is the lock of {lock.recipe}, which is code that a file should not choose; name it: `panax inspect "
            f"{' '.join((lock.recipe, *lock.flags))} --check {path}`"
        )
    return [lock.recipe, *lock.flags]


def make_lock(
    arguments: Sequence[str], step: CompiledStep, batch: dict[str, Any], state_bytes: Mapping[str, int]
) -> StepLock:
    """Trace a step, and return its lock.

    Args:
        arguments: The recipe and its flags, without those of locks.
    """
    parameters = sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(step.program.abstract.params))
    return lock_step(
        arguments[0],
        arguments[1:],
        walk_step(step, batch),
        mesh=step.placement.sizes,
        parameters=parameters,
        state_bytes=state_bytes,
    )


def write_lock(lock: StepLock, path: str) -> str:
    """Write a lock; return a line that reports it.

    Raises:
        DataError: The file can't be written.
    """
    try:
        Path(path).write_text(lock.to_json(), encoding="utf-8")
    except OSError as error:
        raise DataError(f"can't write the lock {path}: {error.strerror or error}") from error
    sent = sum(each.total for each in lock.collectives)
    return (
        f"locked: {lock.flops:.4g} FLOPs, {sent:,.0f} bytes by {len(lock.collectives)} collectives of a step in {path}; "
        f"`panax inspect --check {path}` compares"
    )


def report_changes(lock: StepLock, path: str) -> tuple[list[str], int]:
    """Compare a step with the lock in a file; return lines that report it, and an exit code.

    Raises:
        DataError: The file can't be read, or holds something else.
    """
    locked = read_lock(path)
    changes = describe_changes(locked, lock)
    if not changes:
        return [f"{path}: as locked"], 0
    command = " ".join(("panax inspect", lock.recipe, *lock.flags, "--lock", path))
    lines = [
        f"{path}: {len(changes)} change{'s' if len(changes) > 1 else ''}; this step, compared with the locked one,"
    ]
    lines += [wrap_line(f"  {line}", 4) for line in changes]
    return [*lines, wrap_line(f"if that is intended: {command}")], CHANGED
