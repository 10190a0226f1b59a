"""Values that a forward pass reads from its environment, which a trace would freeze: seeds, clocks, entropy, generators.

While a module is traced, functions that seed PyTorch's generator, draw from the operating system or read a clock are
replaced by functions that raise, and the iterators that its code holds by ones that can't be advanced. Only calls from
the user's own code (and from the packages of the model) raise, since calls of libraries affect no values of the model.
"""

import contextlib
import datetime
import operator
import os
import random
import re
import sys
import time
import timeit
import types
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
import torch

from .randomness import INSTEAD, RandomnessError

HeldValue = tuple[Callable[[Any], None], Any]

SEED_ADVICE = (
    "and the random numbers of a step come from its key, not from PyTorch's generator; draw once when the module is made, and "
    "keep it in a buffer: self.register_buffer(...)"
)
CLOCK_ADVICE = (
    "which a compiled step would hold at the time of its trace; count steps in a buffer, or give the time as a leaf of "
    "the batch"
)

INSTALLED_PATTERN = re.compile(r"[/\\](?:site|dist)-packages[/\\]([^/\\.]+)")
_STANDARD = os.path.dirname(os.__file__) + os.sep
_PANAX = os.path.dirname(os.path.dirname(os.path.dirname(os.path.dirname(__file__)))) + os.sep

_SEEDING = [(torch, "manual_seed"), (torch, "seed"), (torch, "set_rng_state")]
_SEEDING += [(torch.random, name) for name in ("manual_seed", "seed", "set_rng_state", "fork_rng")]
_SEEDING += [(torch.cuda, name) for name in ("manual_seed", "manual_seed_all")]
_CLOCKS = [
    (time, name)
    for name in (
        "time", "time_ns", "monotonic", "monotonic_ns", "perf_counter", "perf_counter_ns", "process_time", "process_time_ns",
        "thread_time", "thread_time_ns", "clock_gettime",
    )
    if hasattr(time, name)
]  # fmt: skip
_CALENDARS = ("localtime", "gmtime")
_ENTROPY = [(os, "urandom"), (random, "_urandom")]

_WATCHED = [
    *_SEEDING, *_ENTROPY, *_CLOCKS, *((time, name) for name in _CALENDARS), (datetime, "datetime"), (datetime, "date"),
]  # fmt: skip


def watched_function_ids() -> set[int]:
    """Return the ids of the current functions that code may have imported under its own names.

    `torch._dynamo` replaces `torch.manual_seed` by a wrapper when it is imported, which may be at any time.
    """
    return {id(getattr(owner, name)) for owner, name in _WATCHED}


@contextlib.contextmanager
def forbid_side_inputs(
    borrowed: Iterable[HeldValue], iterators: Iterable[HeldValue], packages: set[str]
) -> Iterator[None]:
    """Reject, inside the context, reads by the user's code that a trace would freeze.

    Args:
        borrowed: Functions of `watched_function_ids` that code has imported under its own names, each with a
            function that replaces it.
        iterators: Iterators that code holds, in the same form.
        packages: Installed packages with code that counts as the user's.
    """

    def by_user(frame: types.FrameType | None) -> bool:
        return frame is not None and _is_users(frame.f_code.co_filename, packages)

    with contextlib.ExitStack() as undone:
        instead: dict[int, Any] = {}

        def replace(owner: Any, name: str, new: Any) -> None:
            usual = getattr(owner, name)
            instead[id(usual)] = new
            undone.callback(setattr, owner, name, usual)
            setattr(owner, name, new)

        for owner, name in _SEEDING:
            replace(owner, name, _refusing(getattr(owner, name), f"it calls torch.{name}(), {SEED_ADVICE}", by_user))
        for owner, name in _ENTROPY:
            replace(
                owner, name, _refusing(getattr(owner, name), f"it draws from the operating system, {INSTEAD}", by_user)
            )
        replace(random.Random, "seed", _seeded(random.Random.seed, by_user))
        for owner, name in _CLOCKS:
            replace(owner, name, _clock(getattr(owner, name), name, by_user))
        # The same function as time.perf_counter.
        undone.callback(setattr, timeit, "default_timer", timeit.default_timer)
        timeit.default_timer = time.perf_counter
        for name in _CALENDARS:
            replace(time, name, _refusing(getattr(time, name), f"it asks time.{name}(), {CLOCK_ADVICE}", by_user))
        for name, new in _calendar(by_user).items():
            replace(datetime, name, new)
        for put, usual in borrowed:
            if id(usual) in instead:
                undone.callback(put, usual)
                put(instead[id(usual)])
        for put, iterator in iterators:
            undone.callback(put, iterator)
            put(FrozenIterator(iterator))
        yield


def _is_users(file: str, packages: set[str]) -> bool:
    if installed := INSTALLED_PATTERN.search(file):
        return installed[1] in packages and installed[1] not in ("torch", "lightning", "pytorch_lightning")
    return not file.startswith((_STANDARD, _PANAX, "<frozen"))


def _caller() -> types.FrameType | None:
    """Return the nearest frame outside of the modules between an operating system's draw and its caller."""
    frame: types.FrameType | None = sys._getframe(2)
    between = (random.__file__, os.path.join(_STANDARD, "secrets.py"), os.path.dirname(np.random.__file__))
    while frame is not None and frame.f_code.co_filename.startswith(between):
        frame = frame.f_back
    return frame


def _refusing(usual: Callable[..., Any], text: str, by_user: Callable[[Any], bool]) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        # A calendar's functions convert the time that they are given.
        if by_user(_caller()) and not (args and usual.__name__ in _CALENDARS):
            raise RandomnessError(text)
        return usual(*args, **kwargs)

    return call


def _seeded(usual: Callable[..., None], by_user: Callable[[Any], bool]) -> Callable[..., None]:
    def seed(self: random.Random, a: Any = None, *args: Any, **kwargs: Any) -> None:
        if a is None and by_user(_caller()):
            raise RandomnessError(f"it makes a random.Random without a seed, {INSTEAD}")
        usual(self, a, *args, **kwargs)

    return seed


def _clock(usual: Callable[..., Any], name: str, by_user: Callable[[Any], bool]) -> Callable[..., Any]:
    def now(*args: Any) -> Any:
        value = usual(*args)
        return InertClock(f"time.{name}()", value) if by_user(sys._getframe(1)) else value

    return now


class InertClock:
    """A time that may be added, subtracted and printed, as in measurements, but not compared."""

    def __init__(self, source: str, value: Any):
        self._source, self._value = source, value

    def __repr__(self) -> str:
        return repr(self._value)

    def __format__(self, spec: str) -> str:
        return format(self._value, spec)

    def _refuse(self, *args: Any, **kwargs: Any) -> Any:
        raise RandomnessError(f"it lets {self._source} decide a value, {CLOCK_ADVICE}")


def _combining(operation: Callable[[Any, Any], Any], swap: bool) -> Callable[[InertClock, Any], Any]:
    def combine(self: InertClock, other: Any) -> Any:
        if not isinstance(other, int | float | InertClock):
            return self._refuse()
        value = other._value if isinstance(other, InertClock) else other
        pair = (value, self._value) if swap else (self._value, value)
        return InertClock(self._source, operation(*pair))

    return combine


for _name in ("add", "sub", "mul", "truediv", "floordiv", "mod"):
    setattr(InertClock, f"__{_name}__", _combining(getattr(operator, _name), swap=False))
    setattr(InertClock, f"__r{_name}__", _combining(getattr(operator, _name), swap=True))
for _name in (
    "lt", "le", "gt", "ge", "eq", "ne", "bool", "float", "int", "index", "hash", "round", "abs", "neg", "floor", "ceil", "pow",
    "rpow", "array", "len", "iter", "getitem", "torch_function",
):  # fmt: skip
    setattr(InertClock, f"__{_name}__", InertClock._refuse)


def _calendar(by_user: Callable[[Any], bool]) -> dict[str, type]:
    """Return `datetime.datetime` and `datetime.date` that reject requests for the current time."""

    class Kind(type):
        def __instancecheck__(cls, each: Any) -> bool:
            return isinstance(each, cls.__mro__[1])

    def asking(name: str, usual: Callable[..., Any]) -> Any:
        def ask(cls: type, *args: Any) -> Any:
            if by_user(sys._getframe(1)):
                raise RandomnessError(f"it asks {name}(), {CLOCK_ADVICE}")
            return usual(*args)

        return classmethod(ask)

    def made(base: type, names: tuple[str, ...]) -> type:
        methods = {name: asking(f"{base.__name__}.{name}", getattr(base, name)) for name in names}
        return Kind(base.__name__, (base,), methods)

    return {
        "datetime": made(datetime.datetime, ("now", "utcnow", "today")),
        "date": made(datetime.date, ("today",)),
    }


class FrozenIterator:
    """A stand-in for an iterator that raises when it is advanced, so that the iterator stays at its position."""

    def __init__(self, iterator: Any):
        self._iterator = iterator

    def __iter__(self) -> "FrozenIterator":
        return self

    def __next__(self) -> Any:
        raise RandomnessError(
            f"it takes the next value of a {type(self._iterator).__name__}, which a compiled step would hold at one; compute the "
            f"value from a buffer that counts the steps, or give it as a leaf of the batch"
        )

    def send(self, value: Any) -> Any:
        """Raise, as `next` does."""
        return self.__next__()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._iterator, name)
