"""The kernel registry: the limits of each kernel, and the choice of one for a case on a target.

    kernel = choose("attention", case, target).kernel

The choice is a pure function of the case, the target, the recipe's names and the timing result. It never
looks at the attached devices, so a program that is compiled ahead of time for another machine gets that
machine's kernels. Missing requirements of the compiling machine (a library, a compiler) are checked by the
kernel, or passed in.
"""

import contextlib
import dataclasses
import functools
import logging
from collections.abc import Callable, Iterator, Mapping
from contextvars import ContextVar
from typing import Any, NamedTuple

from panax.core.errors import RecipeError, suggest_name
from panax.core.layout.target import Target

logger = logging.getLogger("panax.kernels")

Limit = Callable[[Any, Target], str | None]
"""Function from a case and a target to the reason why a kernel does not support the case, or None."""

NAMED = "it is named"
"""The reason of a choice made by a recipe or a caller."""

EXACT = "exact"
"""Name of the kernels that compute a row from that row alone, bit by bit."""

TIMED = "timing found it fastest"
"""The reason of a choice made by timing."""

_PLURALS = {"cpu": "CPUs", "gpu": "GPUs", "tpu": "TPUs"}


def _nothing(*_: Any) -> None:
    return None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Kernel:
    """One implementation of a kind of work.

    Attributes:
        work: "attention", "partial attention" (separate forward and backward, pieces combined afterwards),
            "context attention" (over devices), "adapted attention" (in traced PyTorch models), "grouped
            matmul", "matmul", "convolution", "row sums", "wall" (a fusion barrier), "cached attention" (of new
            positions to a cache), "norm", "softmax" or "logsumexp" (of rows), or "materialize" (nothing is fused across).
        name: Kernels of one kind for different platforms may share a name.
        run: The implementation; its arguments are those of its kind of work.
        platforms: The platforms that it supports; empty for all (a portable kernel).
        rank: Among the kernels that support a case, the one with the highest rank (the fastest) is chosen.
        limit: Returns why it does not support a case on a target, or None.
        avoid: Returns why it is not chosen by default although it supports the case, or None.
        missing: Returns the library or tool that this machine lacks to build it, or None.
        strict: True if a recipe that names it accepts no other kernel, even in cases that it does not support.
    """

    work: str
    name: str
    run: Any
    platforms: tuple[str, ...] = ()
    rank: int = 0
    limit: Limit = _nothing
    avoid: Limit = _nothing
    missing: Callable[[], str | None] = _nothing
    strict: bool = False


class KernelChoice(NamedTuple):
    """A chosen kernel, and the reason why no faster one was chosen."""

    kernel: Kernel
    reason: str

    @property
    def name(self) -> str:
        return self.kernel.name


_kernels: dict[str, list[Kernel]] = {}


def register(kernel: Kernel, *, replace: bool = False) -> Kernel:
    """Register a kernel; it is then chosen for the cases that it supports if its rank is the highest.

    Args:
        replace: Replace a kernel of the same name.

    Raises:
        ValueError: The kind of work already has a kernel of that name for the same platform.
    """
    others = _kernels.setdefault(kernel.work, [])
    alike = [k for k in others if k.name == kernel.name and _share_platform(k, kernel)]
    if alike and not replace:
        raise ValueError(
            f"a kernel named {kernel.name!r} is already registered for {kernel.work}; choose another name, or pass replace=True"
        )
    _kernels[kernel.work] = sorted([k for k in others if k not in alike] + [kernel], key=lambda k: -k.rank)
    _chosen.cache_clear()
    return kernel


def list_kernels(work: str, target: Target | None = None) -> list[Kernel]:
    """List the kernels of a kind of work, highest rank first; with a target, those for its platform."""
    kernels = _kernels.get(work)
    if kernels is None:
        raise ValueError(f"no kernels are registered for {work!r}; {suggest_name(work, _kernels)}")
    return [kernel for kernel in kernels if target is None or _is_for(kernel, target)]


def list_works() -> tuple[str, ...]:
    """List the kinds of work that have kernels."""
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
    """Choose the kernel for a case on a target.

    Args:
        case: All static properties of the call; hashable.
        named: A kernel's name; "auto" selects the recipe's choice (`use_kernels`), else the fastest.
        timed: The kernel that timing found fastest on this machine; it is chosen if it supports the case.
        lacking: Kernels that can't be built, with the reason; overrides the check of this machine.
        yields: Fall back to another kernel if the named one does not support the case, for work of many sizes
            in a step.

    Raises:
        RecipeError: The named kernel does not exist, or does not support the case and `yields` is False; the
            message gives the reason.
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

    candidates = list_kernels(work, target)
    if named != "auto":
        kernel = _find(work, named, target)
        limit = limit_of(kernel)
        if limit is None:
            return KernelChoice(kernel, NAMED)
        if kernel.strict or not yields:
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
    """Return the kernel that the recipe being traced names for a kind of work, or "auto"."""
    return _named.get().get(work, "auto")


def is_exact() -> bool:
    """Return True if code is traced with exact kernels for all work, see `Kernels.exact_policy`."""
    return named_kernel("matmul") == EXACT


def refuse_exact(what: str) -> None:
    """Check that code without exact kernels is not traced with them.

    Args:
        what: The layer or layout, for the message.

    Raises:
        RecipeError: `Kernels.exact_policy` is set.
    """
    if is_exact():
        raise RecipeError(f"kernels.exact_policy has no kernels for {what}; remove it for this model or mesh")


def check_name(work: str, name: str) -> None:
    """Check that a kernel's name exists.

    Raises:
        RecipeError: The name is unknown; the message suggests the nearest one.
    """
    names = {"auto", *(kernel.name for kernel in list_kernels(work))}
    if name not in names:
        raise RecipeError(f"unknown kernel {name!r} for {work}; {suggest_name(name, names)}")


def _find(work: str, name: str, target: Target) -> Kernel:
    check_name(work, name)
    kernels = [kernel for kernel in list_kernels(work) if kernel.name == name]
    fitting = [kernel for kernel in kernels if _is_for(kernel, target)]
    if not fitting:
        platforms = " and ".join(_PLURALS.get(p, p) for kernel in kernels for p in kernel.platforms)
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
    """Trace code inside this context with the kernels that a recipe names, by kind of work.

    Yields:
        A dictionary that collects a line for each choice noted inside, in order, with its kind of work.
    """
    lines: dict[str, str] = {}
    token_of_names, token_of_lines = _named.set(names), _taken.set(lines)
    try:
        yield lines
    finally:
        _named.reset(token_of_names)
        _taken.reset(token_of_lines)


def log_choice(choice: KernelChoice, target: Target) -> KernelChoice:
    """Record the chosen kernel and the reason, in the log once per process and in the enclosing
    `use_kernels`.
    """
    line = f"{choice.kernel.work} on {target} runs {choice.name!r}: {choice.reason}"
    lines = _taken.get()
    if lines is not None:
        lines[line] = choice.kernel.work
    # A portable kernel is slow if the platform has a specific one.
    platform_kernels = [kernel for kernel in list_kernels(choice.kernel.work, target) if kernel.platforms]
    slow = not choice.kernel.platforms and any(kernel.rank > choice.kernel.rank for kernel in platform_kernels)
    _log_once(line, logging.WARNING if slow and choice.reason != NAMED else logging.INFO)
    return choice


@functools.lru_cache(maxsize=1024)
def _log_once(line: str, level: int) -> None:
    logger.log(level, line)
