"""The kernels of every kind of work: what each can do, and which one a case gets on a target.

    kernel = choose("attention", case, target).kernel

The choice is a pure function of the case, the target, what a recipe names and what timing found fastest. It never looks at the
attached devices, so a program that is compiled ahead of time for another machine gets that machine's kernels. What the machine
that compiles lacks (a library, a compiler) is asked of the kernel, or given.
"""

import contextlib
import dataclasses
import functools
import logging
from collections.abc import Callable, Iterator, Mapping
from contextvars import ContextVar
from typing import Any, NamedTuple

from panax.core.errors import RecipeError, nearest
from panax.core.target import Target

logger = logging.getLogger("panax.kernels")

Limit = Callable[[Any, Target], str | None]
"""Takes a case and a target; returns what keeps a kernel from doing the case, in words, or None."""

NAMED = "it is named"
"""The reason of a choice that a recipe or a caller made."""

TIMED = "timing found it fastest"
"""The reason of a choice that was measured."""

_PLURALS = {"cpu": "CPUs", "gpu": "GPUs", "tpu": "TPUs"}


def _nothing(*_: Any) -> None:
    return None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Kernel:
    """One way to do a kind of work.

    Attributes:
        work: "attention", "partial attention" (forward and backward apart, pieces put together afterwards), "context attention"
            (over devices), "adapted attention" (in traced PyTorch models), "grouped matmul", "matmul", "convolution", "row sums",
            or "wall" (which nothing is fused across).
        name: Kernels of one kind for different platforms may share a name.
        run: What does it; its arguments are those of its kind of work.
        platforms: The platforms that it is for; empty for all, which makes it portable.
        rank: Of the kernels that can do a case, the one of the highest rank is chosen: the fastest first.
        limit: What keeps it from a case on a target.
        avoid: Why it is passed over, though it can do the case, where nothing names it.
        missing: What this machine lacks to build it, or None.
    """

    work: str
    name: str
    run: Any
    platforms: tuple[str, ...] = ()
    rank: int = 0
    limit: Limit = _nothing
    avoid: Limit = _nothing
    missing: Callable[[], str | None] = _nothing


class KernelChoice(NamedTuple):
    """A kernel, and why it and none that is faster."""

    kernel: Kernel
    reason: str

    @property
    def name(self) -> str:
        return self.kernel.name


_kernels: dict[str, list[Kernel]] = {}


def register(kernel: Kernel, *, replace: bool = False) -> Kernel:
    """Make a kernel known: from now on it is chosen where it can do a case and its rank is the highest.

    Args:
        replace: Take the place of a kernel of the same name.

    Raises:
        ValueError: The kind has a kernel of that name for the same platform.
    """
    others = _kernels.setdefault(kernel.work, [])
    alike = [k for k in others if k.name == kernel.name and _share_platform(k, kernel)]
    if alike and not replace:
        raise ValueError(f"there is a kernel {kernel.name!r} for {kernel.work}; give another name, or replace=True")
    _kernels[kernel.work] = sorted([k for k in others if k not in alike] + [kernel], key=lambda k: -k.rank)
    _chosen.cache_clear()
    return kernel


def kernels_of(work: str, target: Target | None = None) -> list[Kernel]:
    """The kernels of a kind of work, the highest rank first; with a target, those for its platform."""
    found = _kernels.get(work)
    if found is None:
        raise ValueError(f"there are no kernels for {work!r}; {nearest(work, _kernels)}")
    return [kernel for kernel in found if target is None or _is_for(kernel, target)]


def works() -> tuple[str, ...]:
    """The kinds of work that have kernels."""
    return tuple(_kernels)


def choose(
    work: str,
    case: Any,
    target: Target,
    *,
    named: str = "auto",
    timed: str = "",
    lacking: Mapping[str, str] | None = None,
    yields: bool = False,
) -> KernelChoice:
    """The kernel for a case on a target.

    Args:
        case: Everything about the call that is known before it runs; hashable.
        named: A kernel's name; "auto" takes what the recipe names (`use_kernels`), and else the fastest.
        timed: The kernel that timing found fastest on this machine; it is taken where it can do the case.
        lacking: Kernels that can't be built, with the reason, in place of what this machine lacks.
        yields: Leave a case that the named kernel can't do to another: for work that a step has in many sizes.

    Raises:
        RecipeError: There is no kernel of that name, or it can't do the case and does not yield; the message says why.
    """
    named = named_kernel(work) if named == "auto" else named
    return _chosen(work, case, target, named, timed, None if lacking is None else tuple(lacking.items()), yields)


@functools.lru_cache(maxsize=4096)
def _chosen(
    work: str,
    case: Any,
    target: Target,
    named: str,
    timed: str,
    lacking: tuple[tuple[str, str], ...] | None,
    yields: bool,
) -> KernelChoice:
    def limit_of(kernel: Kernel) -> str | None:
        missing = kernel.missing() if lacking is None else dict(lacking).get(kernel.name)
        return kernel.limit(case, target) or missing

    candidates = kernels_of(work, target)
    if named != "auto":
        kernel = _find(work, named, target)
        limit = limit_of(kernel)
        if limit is None:
            return KernelChoice(kernel, NAMED)
        if not yields:
            raise RecipeError(f"{named!r} can't do this {work}: {limit}; got {case}")
        candidates.remove(kernel)
        timed = ""
    for kernel in candidates:
        if kernel.name == timed and limit_of(kernel) is None:
            return KernelChoice(kernel, TIMED)
    why_not = []
    for kernel in candidates:
        limit, avoid = limit_of(kernel), kernel.avoid(case, target)
        if limit is None and avoid is None:
            return KernelChoice(kernel, "; ".join(why_not) or f"the fastest on {target.platform}")
        why_not.append(f"{kernel.name} can't run here: {limit}" if limit else f"{kernel.name} is not taken: {avoid}")
    raise RecipeError(f"no kernel for {work} can do this on {target}: {'; '.join(why_not) or 'none is registered'}")


def named_kernel(work: str) -> str:
    """What the recipe that is being traced names for a kind of work; "auto" where it names nothing."""
    return _named.get().get(work, "auto")


def check_name(work: str, name: str) -> None:
    """See that a recipe can name a kernel.

    Raises:
        RecipeError: There is not one of that name; the message has the nearest one.
    """
    names = {"auto", *(kernel.name for kernel in kernels_of(work))}
    if name not in names:
        raise RecipeError(f"there is no kernel {name!r} for {work}; {nearest(name, names)}")


def _find(work: str, name: str, target: Target) -> Kernel:
    check_name(work, name)
    found = [kernel for kernel in kernels_of(work) if kernel.name == name]
    fitting = [kernel for kernel in found if _is_for(kernel, target)]
    if not fitting:
        platforms = " and ".join(_PLURALS.get(p, p) for kernel in found for p in kernel.platforms)
        raise RecipeError(f"{name!r} can't do this {work}: it is for {platforms}, and the target is {target}")
    return fitting[0]


def _is_for(kernel: Kernel, target: Target) -> bool:
    return not kernel.platforms or target.platform in kernel.platforms


def _share_platform(a: Kernel, b: Kernel) -> bool:
    return a.platforms == b.platforms or bool(set(a.platforms) & set(b.platforms))


_named: ContextVar[Mapping[str, str]] = ContextVar("panax_named_kernels", default={})  # noqa: B039
_taken: ContextVar[dict[str, str] | None] = ContextVar("panax_taken_kernels", default=None)


@contextlib.contextmanager
def use_kernels(names: Mapping[str, str]) -> Iterator[dict[str, str]]:
    """Trace what is inside with the kernels that a recipe names, by kind of work.

    Yields:
        A line for each choice that is noted inside, in their order, and its kind of work.
    """
    lines: dict[str, str] = {}
    named, taken = _named.set(names), _taken.set(lines)
    try:
        yield lines
    finally:
        _named.reset(named)
        _taken.reset(taken)


def note(choice: KernelChoice, target: Target) -> KernelChoice:
    """Say which kernel is taken and why: to the log once in a process, and to the `use_kernels` around it."""
    line = f"{choice.kernel.work} on {target} runs {choice.name!r}: {choice.reason}"
    lines = _taken.get()
    if lines is not None:
        lines[line] = choice.kernel.work
    # A portable kernel where the platform has a faster one of its own is slow.
    own = [kernel for kernel in kernels_of(choice.kernel.work, target) if kernel.platforms]
    slow = not choice.kernel.platforms and any(kernel.rank > choice.kernel.rank for kernel in own)
    _log_once(line, logging.WARNING if slow and choice.reason != NAMED else logging.INFO)
    return choice


@functools.lru_cache(maxsize=1024)
def _log_once(line: str, level: int) -> None:
    logger.log(level, line)
