"""Which tiers a command line selects, before pytest reads it."""

import os
from collections.abc import Sequence
from importlib.metadata import version
from itertools import pairwise

from _pytest.mark.expression import Expression

_VARIABLE = "PANAX_TEST_SELECTS_SLOW"


def options_of_a_run() -> dict[str, bool]:
    """Return compiler options for a test that looks at a whole program's operations, as a run compiles them."""
    return {"xla_cpu_use_fusion_emitters": True} if _has_older_emitter() else {}


def _has_older_emitter() -> bool:
    return version("jaxlib").startswith("0.10.")


def emitter_flag(arguments: Sequence[str]) -> str:
    """Return the flag for XLA's older emitter of fusions, unless slow tests may be selected; JAX 0.12 has no other one."""
    cheap = _has_older_emitter() and not selects_slow(arguments)
    return "--xla_cpu_use_fusion_emitters=false " if cheap else ""


def selects_slow(arguments: Sequence[str]) -> bool:
    """Return True if the command line's `-m` selects slow tests; a worker, which has no command line, asks its controller.

    >>> selects_slow(["pytest", "-m", "slow", "--share", "6"]), selects_slow(["pytest", "-mfull"])
    (True, False)
    """
    if "PYTEST_XDIST_WORKER" in os.environ:
        return os.environ.get(_VARIABLE) == "1"
    expressions = [following for each, following in pairwise(arguments) if each == "-m"]
    expressions += [each[2:] for each in arguments if each.startswith("-m") and len(each) > 2]
    found = bool(expressions) and Expression.compile(expressions[-1]).evaluate(lambda name, **_: name == "slow")
    os.environ[_VARIABLE] = "1" if found else "0"
    return found
