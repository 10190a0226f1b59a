"""Errors that a user can cause; the command line prints them as one message with an exit code, without a
traceback.

They derive from `ValueError`, `OSError` or `RuntimeError` for library callers; separate types exist only
where a caller branches on them.
"""

import difflib
from collections.abc import Iterable


class PanaxError(Exception):
    """An error outside the program. The message states what was expected, what was found, and the fix."""

    exit_code = 1


class RecipeError(PanaxError, ValueError):
    """A recipe, or a field or value in it, is invalid."""

    exit_code = 2


class LayoutError(PanaxError, ValueError):
    """A mesh, a rule or a dimension does not fit the others."""

    exit_code = 2


class DataError(PanaxError, ValueError):
    """A corpus, file or record cannot be read or holds nothing to train on."""

    exit_code = 3


class CheckpointError(PanaxError, OSError):
    """A checkpoint cannot be written or read, or belongs to a different model."""

    exit_code = 4


class DamagedError(CheckpointError):
    """A checkpoint differs from what was written: truncated, changed or incomplete. An older one may be
    intact.
    """


class StoreError(PanaxError, OSError):
    """A read or write of a disk or object store failed, after retries if these could help."""

    exit_code = 4


class TrainingError(PanaxError, RuntimeError):
    """The run cannot continue: too many non-finite steps, or a recompilation that would slow all steps."""

    exit_code = 5


class HookError(TrainingError):
    """A hook raised; the run was saved if it had started."""


class JoinError(TrainingError):
    """The processes of a job did not all join, or do not match."""


class LaunchError(PanaxError, RuntimeError):
    """Processes cannot be placed, started or joined, or they failed more often than the policy allows."""

    exit_code = 6


def describe_type(value: object) -> str:
    """Return the name of a value's type with its article.

    >>> describe_type(3), describe_type("x")
    ('an int', 'a str')
    """
    name = type(value).__name__
    return f"{'an' if name[:1].lower() in 'aeiou' or name == 'ndarray' else 'a'} {name}"


def suggest_name(name: str, choices: Iterable[str]) -> str:
    """Return a clause that suggests the choice closest to `name`, or lists all choices.

    >>> suggest_name("quikstart", ["quickstart", "gpt2"])
    "did you mean 'quickstart'?"
    """
    choices = sorted(choices)
    close = difflib.get_close_matches(name, choices, n=1, cutoff=0.6)
    return f"did you mean {close[0]!r}?" if close else f"known: {', '.join(choices)}"
