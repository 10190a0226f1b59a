"""Values with state that no attribute shows: iterators, random generators, memory, context variables,
references."""

import contextvars
import hashlib
import io
import itertools
import random
import types
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch

from .python_seen import (
    MAX_BYTES,
    MAX_ENTRIES,
    PLAIN_TYPES,
    SKIPPED_PACKAGES,
    SeenValue,
    ValueLocation,
    comparison_token,
    find_package,
)


def inspect_memory(location: ValueLocation, value: Any) -> SeenValue:
    """Inspect an object that exposes its bytes: arrays of the standard library, C values in shared memory."""
    try:
        view = memoryview(value).cast("B")
    except (TypeError, ValueError):  # released, or not contiguous
        return SeenValue(type(value).__name__)
    if view.nbytes > MAX_BYTES:
        return SeenValue((type(value).__name__, view.nbytes))
    saved = bytes(view)
    view.release()

    def restore() -> None:
        with memoryview(value).cast("B") as current_view:
            if not current_view.readonly and current_view.nbytes == len(saved) and bytes(current_view) != saved:
                current_view[:] = saved
        if isinstance(value, bytearray) and bytes(value) != saved:
            value[:] = saved

    return SeenValue((type(value).__name__, len(saved), hashlib.sha256(saved).hexdigest()), (), restore)


def inspect_context_variable(location: ValueLocation, value: contextvars.ContextVar[Any]) -> SeenValue:
    try:
        held = value.get()
    except LookupError:
        return SeenValue("context variable")

    def restore() -> None:
        if value.get() is not held:
            value.set(held)

    return SeenValue("context variable", [(location.under(".get()"), held)], restore)


def inspect_reference(location: ValueLocation, value: Any) -> SeenValue:
    """Inspect a weak reference, which keeps no tensor alive but refers to an object."""
    held = value()
    children = [] if held is None or isinstance(held, torch.Tensor) else [(location.under("()"), held)]
    return SeenValue(type(value).__name__, children)


def is_iterator(value: Any) -> bool:
    """Return True for an iterator that advances when a value is taken and has no attribute with its position, such
    as a generator or `itertools.cycle`."""
    if not isinstance(value, Iterator) or isinstance(value, io.IOBase | itertools.count):
        return False
    return find_package(type(value)) in SKIPPED_PACKAGES or not hasattr(value, "__dict__")


def inspect_iterator(location: ValueLocation, value: Any) -> SeenValue:
    """Inspect the position of an iterator that can't be replaced, such as one in a tuple."""
    if isinstance(value, types.GeneratorType):
        frame = value.gi_frame
        if frame is None:
            return SeenValue(("generator", "at its end"))
        held = [(location.under(f".{name}"), each) for name, each in frame.f_locals.items()]
        return SeenValue(("generator", frame.f_lasti), held)
    return SeenValue((type(value).__name__, hash(_how_far(value)), ""))


def _how_far(value: Any, depth: int = 4) -> Any:
    if isinstance(value, PLAIN_TYPES):
        return comparison_token(value)
    if isinstance(value, list | tuple):
        return tuple(_how_far(each, depth) for each in value[:MAX_ENTRIES])
    if not isinstance(value, Iterator) or not depth:
        return id(value)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that itertools can't be copied in future (Python 3.12)
        try:
            return _how_far(tuple(value.__reduce__())[1:], depth - 1)
        except (TypeError, AttributeError, NotImplementedError):
            return getattr(value, "__length_hint__", lambda: "unknown")()


def inspect_generator(location: ValueLocation, value: Any) -> SeenValue:
    if isinstance(value, random.SystemRandom):  # no state: its draws are refused when they are made
        return SeenValue(type(value).__name__)
    get, put = GENERATORS[next(kind for kind in GENERATORS if isinstance(value, kind))]
    saved = get(value)
    return SeenValue(("random generator", _fingerprint(saved)), (), lambda: put(value, saved))


def _fingerprint(state: Any) -> Any:
    if isinstance(state, dict):
        return tuple((name, _fingerprint(each)) for name, each in state.items())
    if isinstance(state, tuple):
        return hash(tuple(map(_fingerprint, state)))
    return hash(state.tobytes()) if isinstance(state, np.ndarray) else state


def _set_bits(generator: Any, state: Any) -> None:
    generator.bit_generator.state = state


GENERATORS: dict[type, tuple[Callable[[Any], Any], Callable[[Any, Any], None]]] = {
    random.Random: (lambda g: g.getstate(), lambda g, s: g.setstate(s)),
    np.random.Generator: (lambda g: g.bit_generator.state, _set_bits),
    np.random.RandomState: (lambda g: g.get_state(), lambda g, s: g.set_state(s)),
    torch.Generator: (
        lambda g: bytes(g.get_state().numpy()),
        lambda g, s: g.set_state(torch.tensor(list(s), dtype=torch.uint8)),
    ),
}
