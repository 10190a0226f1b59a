"""Which implementation of the grouped products a target gets, and why: a pure function of the static case."""

import dataclasses
import functools
import logging
from typing import Literal, get_args

from panax.core.errors import nearest
from panax.core.target import Target
from panax.kernels.attention_choice import Choice

logger = logging.getLogger("panax.kernels")

Implementation = Literal["auto", "reference", "blocked", "triton", "megablox"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class GroupedCase:
    """What is known of a grouped product before it runs, as far as a choice depends on it.

    Attributes:
        tile: Rows that no two groups share.
        dtype: The name of the operands' dtype.
    """

    tile: int
    dtype: str


def choose_grouped(case: GroupedCase, target: Target) -> Choice:
    """The target platform's kernel where it can do the case, and "blocked" elsewhere."""
    if target.platform == "cpu":
        return Choice("blocked", "the fastest on the CPU of those here")
    name = _KERNELS[target.platform]
    limit = limit_of_grouped(name, case, target)
    if limit is None:
        return Choice(name, f"the kernel for {target}")
    return Choice("blocked", f"{name} can't run here: {limit}")


def limit_of_grouped(name: str, case: GroupedCase, target: Target) -> str | None:
    """What keeps an implementation from doing the case on the platform, or None if nothing does."""
    if name not in get_args(Implementation) or name == "auto":
        raise ValueError(f"implementation={name!r}: {nearest(name, get_args(Implementation))}")
    if name not in _KERNELS.values():
        return None
    if name != _KERNELS.get(target.platform):
        return f"it is for {'GPUs' if name == 'triton' else 'TPUs'}, and the target is {target}"
    dtypes, tile = _LIMITS[name]
    if case.dtype not in dtypes:
        return f"operands must be {' or '.join(dtypes)}, not {case.dtype}"
    if case.tile % tile:
        return f"tile={case.tile} must be a multiple of {tile}; choose_tile gives one"
    return None


@functools.cache
def say_grouped_once(target: Target, choice: Choice) -> None:
    """Warn that a target runs something else than its kernel, once per distinct reason."""
    if choice.name != _KERNELS.get(target.platform, "blocked"):
        logger.warning("grouped products on %s run %r: %s", target, choice.name, choice.reason)


_KERNELS = {"gpu": "triton", "tpu": "megablox"}

# The dtypes of the operands, and what a tile is a multiple of.
_LIMITS = {"triton": (("bfloat16", "float16", "float32"), 16), "megablox": (("bfloat16", "float32"), 128)}
