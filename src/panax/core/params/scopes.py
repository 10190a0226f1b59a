"""Names of the model part being traced, used in profiles and errors.

`with scope("layers.3"), scope("attention"):` names the operations for a profiler, and any exception raised
inside carries "in layers.3.attention", so a shape error or a NaN shows its location without reading the
traceback.
"""

import contextlib
import math
from collections.abc import Callable, Iterator
from contextvars import ContextVar

import jax
from jax.core import Tracer

_path: ContextVar[tuple[str, ...]] = ContextVar("panax_scope", default=())
_debugging: ContextVar[bool] = ContextVar("panax_debugging", default=False)


def current_scope() -> str:
    """Return the dotted path of the enclosing scopes; empty outside of any."""
    return ".".join(_path.get())


@contextlib.contextmanager
def scope(name: str) -> Iterator[None]:
    """Name the code traced inside; an exception that leaves the innermost scope gets its path as a note."""
    token = _path.set((*_path.get(), name))
    try:
        with jax.named_scope(name):
            yield
    except Exception as error:
        # Only the innermost scope, the first one that the exception passes, adds a note.
        if not any(note.startswith("in model part ") for note in getattr(error, "__notes__", ())):
            error.add_note(f"in model part {current_scope()!r}")
        raise
    finally:
        _path.reset(token)


def is_debugging() -> bool:
    """Return True in the forward pass of `--debug`, in which every value in the model is concrete:
    `float(x)`, NumPy and pdb work.

    Guard code that needs concrete values with it, so that the same model file also trains compiled:
    `if panax.is_debugging(): print(float(x.mean()))`.
    """
    return _debugging.get()


def nan_for(broken: Callable[[], jax.Array]) -> float:
    """Return NaN, which marks elements as broken; 0 if NaNs raise errors (`--debug`) and no element is broken.

    With `--debug`, a NaN constant would raise an error even if no element took it.

    Args:
        broken: Returns True for each broken element; called only with `--debug`.
    """
    if not jax.config.jax_debug_nans:  # pyright: ignore[reportAttributeAccessIssue]
        return math.nan
    mask = broken()
    return math.nan if isinstance(mask, Tracer) or mask.any() else 0.0


@contextlib.contextmanager
def use_eager_values() -> Iterator[None]:
    """Declare that the code inside runs eagerly on concrete values."""
    token = _debugging.set(True)
    try:
        yield
    finally:
        _debugging.reset(token)
