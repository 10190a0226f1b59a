"""Errors a user can cause, which the command line shows as one message and an exit code, without a traceback.

`ValueError`, `TypeError` and `OSError` stay what they are for a library caller; these types exist where a caller branches.
"""

import difflib
from collections.abc import Iterable


class PanaxError(Exception):
    """Something outside the program is wrong. The message says what was expected, what came, and what to do."""

    exit_code = 1


class RecipeError(PanaxError, ValueError):
    """A recipe, a field or a value in it can't be used."""

    exit_code = 2


class LayoutError(PanaxError, ValueError):
    """A mesh, a rule or a dimension that does not fit the others."""

    exit_code = 2


class DataError(PanaxError, ValueError):
    """A corpus, a file or a record can't be read or holds nothing to train on."""

    exit_code = 3


class CheckpointError(PanaxError, OSError):
    """A checkpoint can't be written, read, or is of another model."""

    exit_code = 4


class DamagedError(CheckpointError):
    """A checkpoint is not what was written: cut short, changed, or incomplete. An older one may be whole."""


class StoreError(PanaxError, OSError):
    """A disk or an object store refuses to read or write; retries were made where they could help."""

    exit_code = 4


class TrainingError(PanaxError, RuntimeError):
    """The run can't go on: too many non-finite steps, or a recompilation that would make every step slow."""

    exit_code = 5


class HookError(TrainingError):
    """A hook raised; the run has been saved, where it had begun."""


class JoinError(TrainingError):
    """The processes of a job did not all come, or are not alike."""


class LaunchError(PanaxError, RuntimeError):
    """Processes can't be placed, started or joined; or they failed more often than the policy allows."""

    exit_code = 6


def kind_of(value: object) -> str:
    """A value's type with its article.

    >>> kind_of(3), kind_of("x")
    ('an int', 'a str')
    """
    name = type(value).__name__
    return f"{'an' if name[:1].lower() in 'aeiou' or name == 'ndarray' else 'a'} {name}"


def nearest(name: str, known: Iterable[str]) -> str:
    """A clause that names the known word closest to `name`, or lists them all.

    >>> nearest("quikstart", ["quickstart", "gpt2"])
    "did you mean 'quickstart'?"
    """
    known = sorted(known)
    close = difflib.get_close_matches(name, known, n=1, cutoff=0.6)
    return f"did you mean {close[0]!r}?" if close else f"known: {', '.join(known)}"
