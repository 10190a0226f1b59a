"""Names for the place in the model that is being traced: in the profile, and in the errors.

`with scope("layers.3"), scope("attention"):` names the operations for a profiler, and whatever is raised inside carries
"in layers.3.attention", so that a shape error or a NaN says where it happened without a reading of the traceback.
"""

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar

import jax

_path: ContextVar[tuple[str, ...]] = ContextVar("panax_scope", default=())
_debugging: ContextVar[bool] = ContextVar("panax_debugging", default=False)


def current_scope() -> str:
    """The dotted path of the enclosing scopes; empty outside of any."""
    return ".".join(_path.get())


@contextlib.contextmanager
def scope(name: str) -> Iterator[None]:
    """Name what is traced inside; an exception that leaves the innermost scope is given its path as a note."""
    token = _path.set((*_path.get(), name))
    try:
        with jax.named_scope(name):
            yield
    except Exception as error:
        # Only the innermost scope speaks: the first one that the exception passes.
        if not any(note.startswith("in model part ") for note in getattr(error, "__notes__", ())):
            error.add_note(f"in model part {current_scope()!r}")
        raise
    finally:
        _path.reset(token)


def debugging() -> bool:
    """True in the forward pass of `--debug`, where every value in the model is real: `float(x)`, NumPy and pdb work.

    Guard with it what only makes sense on real values, so that the same model file also trains compiled:
    `if panax.debugging(): print(float(x.mean()))`.
    """
    return _debugging.get()


@contextlib.contextmanager
def real_values() -> Iterator[None]:
    """Declare that what runs inside runs eagerly on real values."""
    token = _debugging.set(True)
    try:
        yield
    finally:
        _debugging.reset(token)
