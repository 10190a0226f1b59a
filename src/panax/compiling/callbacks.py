"""Errors of a compiled step's callbacks on the host, raised unchanged in the code that waits for the step.

JAX logs an exception of a callback and wraps it, as text with both tracebacks, in a runtime error.
"""

import contextlib
import logging
import threading
from collections.abc import Iterator

import jax

from ..core.errors import PanaxError

_raised: list[PanaxError] = []
_lock = threading.Lock()


@contextlib.contextmanager
def capture_callback_errors() -> Iterator[None]:
    """Store an error in the body of a callback for `reraise_callback_errors`."""
    try:
        yield
    except PanaxError as error:
        with _lock:
            _raised.append(error)
        raise


@contextlib.contextmanager
def reraise_callback_errors() -> Iterator[None]:
    """Raise the first error of a callback instead of the runtime's, in code that waits for steps.

    Raises:
        PanaxError: A callback raised it.
    """
    logger = logging.getLogger("jax._src.callback")
    logger.addFilter(_is_other_error)
    with _lock:
        _raised.clear()
    try:
        yield
    except jax.errors.JaxRuntimeError:
        with _lock:
            first = _raised[0] if _raised else None
        if first is None:
            raise
        raise first from None
    finally:
        logger.removeFilter(_is_other_error)


def _is_other_error(record: logging.LogRecord) -> bool:
    """Return True if a log record is about another error."""
    error = record.exc_info[1] if record.exc_info else None
    return not isinstance(error, PanaxError)
