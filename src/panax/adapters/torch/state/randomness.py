"""Random numbers of Python and NumPy in a forward pass: a trace would freeze the first outcome in every step.

A draw that is compared with a probability of 0 or 1, as in LayerDrop when it is switched off, has the same
outcome each time and is allowed. Any other use of a draw is rejected, with the line. Draws by other functions
are detected by the state of the generators, which differs after each forward that draws.
"""

import contextlib
import linecache
import os
import random
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import jaxtyping
import numpy as np
import torch

INSTEAD = "which a compiled step would hold at one outcome; draw with torch.rand and choose with torch.where, or switch it off"


RAISED_ERRORS: list["RandomnessError"] = []
"""Errors raised since the list was emptied: an `except` in the model may have swallowed one."""


class RandomnessError(Exception):
    """Error for a value that differs from step to step, such as a random draw, and would affect the computation."""

    def __init__(self, text: str):
        super().__init__(text)
        RAISED_ERRORS.append(self)


class _Draw:
    """A number in an interval that is not drawn yet: it can only be compared with values outside of the interval."""

    def __init__(self, source: str, low: float, high: float):
        self._source, self._low, self._high = source, low, high

    def __lt__(self, other: Any) -> bool:
        return self._is(other, below=self._high, above=self._low, true_below=True)

    def __le__(self, other: Any) -> bool:
        return self._is(other, below=self._high, above=self._low, true_below=True)

    def __gt__(self, other: Any) -> bool:
        return not self._is(other, below=self._high, above=self._low, true_below=True)

    def __ge__(self, other: Any) -> bool:
        return not self._is(other, below=self._high, above=self._low, true_below=True)

    def _is(self, other: Any, *, below: float, above: float, true_below: bool) -> bool:
        if isinstance(other, int | float | np.number):
            if other >= below:
                return true_below
            if other <= above:
                return not true_below
        raise self._refused()

    def _refused(self) -> RandomnessError:
        return RandomnessError(f"it draws a number by {self._source}, {INSTEAD}")


def _refuses(self: _Draw, *args: Any, **kwargs: Any) -> Any:
    raise self._refused()


for _name in (
    "add", "radd", "sub", "rsub", "mul", "rmul", "truediv", "rtruediv", "floordiv", "rfloordiv", "mod", "rmod", "pow", "rpow",
    "neg", "abs", "float", "int", "index", "bool", "round", "floor", "ceil", "trunc", "eq", "ne", "array", "getattr", "hash",
    "getitem", "iter", "len", "torch_function",
):  # fmt: skip
    setattr(_Draw, f"__{_name}__", _refuses)


@contextlib.contextmanager
def forbid_python_draws(
    borrowed: Iterable[tuple[Callable[[Any], None], Any]], where: Callable[[], str]
) -> Iterator[list[str]]:
    """Replace the uniform draws of `random` and `np.random` inside the context: see `_Draw`.

    Args:
        borrowed: Functions of `random` that code has imported under its own names, each with a function that
            replaces it.
        where: Returns the running module.

    Yields:
        The modules that draw from `random` by its other functions, with their lines.
    """
    with contextlib.ExitStack() as undone:
        lines: list[str] = []

        def recorded(usual: Callable[..., Any]) -> Callable[..., Any]:
            interval = {"random": lambda: (0.0, 1.0), "uniform": lambda a, b: (min(a, b), max(a, b))}.get(
                usual.__name__
            )
            if interval is not None:
                return _instead(usual, f"random.{usual.__name__}()", interval)

            def call(*args: Any, **kwargs: Any) -> Any:
                lines.append(where() + " draws from Python's random" + format_line(traceback.extract_stack()))
                return usual(*args, **kwargs)

            return call

        for put, usual in borrowed:
            if usual.__name__ in _DRAWING:
                undone.callback(put, usual)
                put(recorded(usual))
        for name in _DRAWING:
            _replace(undone, random, name, recorded(getattr(random, name)))
        for name, interval in _NUMPYS.items():
            _replace(undone, np.random, name, _instead(getattr(np.random, name), f"np.random.{name}()", interval))
        yield lines


_DRAWING = (
    "random", "uniform", "randint", "randrange", "choice", "choices", "shuffle", "sample", "gauss", "normalvariate", "triangular",
    "betavariate", "expovariate", "gammavariate", "lognormvariate", "getrandbits", "randbytes", "vonmisesvariate",
    "paretovariate", "weibullvariate", *(["binomialvariate"] if hasattr(random, "binomialvariate") else []),
)  # fmt: skip

_NUMPYS: dict[str, Callable[..., tuple[float, float] | None]] = {
    "rand": lambda *size: None if size else (0.0, 1.0),
    "random": lambda size=None: (0.0, 1.0) if size is None else None,
    "random_sample": lambda size=None: (0.0, 1.0) if size is None else None,
    "uniform": lambda low=0.0, high=1.0, size=None: (
        (float(low), float(high)) if size is None and np.ndim(low) == np.ndim(high) == 0 else None
    ),
}
"""For functions that draw uniform numbers, the interval of a single draw; None if several are requested."""


def _instead(usual: Callable[..., Any], source: str, interval: Callable[..., Any]) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        bounds = interval(*args, **kwargs)
        return usual(*args, **kwargs) if bounds is None else _Draw(source, *bounds)

    return call


def _replace(undone: contextlib.ExitStack, module: Any, name: str, function: Callable[..., Any]) -> None:
    undone.callback(setattr, module, name, getattr(module, name))
    setattr(module, name, function)


def format_line(stack: Sequence[traceback.FrameSummary]) -> str:
    """Return the innermost line that is neither PyTorch's nor Panax's; a line of the standard library only if there
    is no other."""
    frames = [frame for frame in stack if not frame.filename.startswith((*_LIBRARY, "<"))]
    own = [frame for frame in frames if not _is_standard(frame.filename)]
    for frame in reversed(own or frames):
        return f", at {frame.filename}:{frame.lineno} `{linecache.getline(frame.filename, frame.lineno or 0).strip()}`"
    return ""


def _is_standard(file: str) -> bool:
    standard = file.startswith(os.path.dirname(os.__file__) + os.sep) and "-packages" not in file
    return standard or file.startswith(os.path.dirname(np.__file__) + os.sep) or file.endswith(".pyx")


_LIBRARY = (
    os.path.dirname(torch.__file__),
    os.path.dirname(jaxtyping.__file__),
    os.path.dirname(os.path.dirname(os.path.dirname(os.path.dirname(__file__)))),
)
