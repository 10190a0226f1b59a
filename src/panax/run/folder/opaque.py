"""Short descriptions of values that JSON can't represent: their type, and a digest of the parts that affect a
run.

Without the digest, values inside an optax transformation, or arrays that are trained on, would look the same
for every run.
"""

import types
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import xxhash

_MOST_NODES = 100_000
_DEEPEST = 30


def fingerprint_value(value: Any) -> str:
    """Return the type of a value, with a digest of its contents if there is anything to hash.

    For a function: the values that it closes over, its defaults and constants. For arrays in lists and
    mappings: their bytes. For any other object: nothing, since it may hold values that differ between
    processes.

    >>> import optax
    >>> [fingerprint_value(optax.sgd(0.1)) == fingerprint_value(optax.sgd(rate)) for rate in (0.1, 0.2)]
    [True, False]
    """
    kind = f"{type(value).__module__}.{type(value).__qualname__}"
    digest, nodes = xxhash.xxh3_64(), 0
    for part in _parts(value, _DEEPEST, frozenset()):
        digest.update(part)
        nodes += 1
        if nodes > _MOST_NODES:
            break
    return f"<{kind} #{digest.hexdigest()}>" if nodes > 1 else f"<{kind}>"


def _parts(value: Any, depth: int, above: frozenset[int], bytes_too: bool = True) -> Iterator[bytes]:
    """Yield the bytes to hash for a value nested in the values `above`; for arrays their bytes too, or only
    their shapes."""
    if id(value) in above or depth == 0:
        return

    def inner(each: Any, bytes_too: bool = bytes_too) -> Iterator[bytes]:
        return _parts(each, depth - 1, above | {id(value)}, bytes_too)

    if value is None or isinstance(value, bool | int | float | complex | str | bytes):
        yield repr(value).encode()
    elif isinstance(value, np.generic) or (hasattr(value, "dtype") and hasattr(value, "__array__")):
        # A function may close over weights, initialized again in each process.
        yield from _array(value, bytes_too or not getattr(value, "shape", ()))
    elif isinstance(value, Mapping):
        yield b"{"
        for key in sorted(value, key=repr):
            yield repr(key).encode()
            yield from inner(value[key])
    elif isinstance(value, list | tuple):
        yield b"["
        for each in value:
            yield from inner(each)
    elif isinstance(value, types.FunctionType):
        yield f"{value.__module__}.{value.__qualname__}".encode()
        yield from _constants(value.__code__)
        yield from inner((value.__defaults__, value.__kwdefaults__), False)
        for cell in value.__closure__ or ():
            try:
                yield from inner(cell.cell_contents, False)
            except ValueError:  # a cell that is still empty
                yield b"empty"
    elif isinstance(value, types.MethodType):
        yield from inner(value.__func__)
    elif hasattr(value, "func") and hasattr(value, "keywords") and hasattr(value, "args"):
        yield from inner((value.func, value.args, value.keywords))
    else:
        yield f"{type(value).__module__}.{type(value).__qualname__}".encode()


def _array(value: Any, bytes_too: bool) -> Iterator[bytes]:
    try:
        if not bytes_too:
            raise TypeError("its shape alone")
        array = np.asarray(value)
        if array.dtype.hasobject:
            raise TypeError("objects")
        yield f"{array.dtype}{array.shape}".encode()
        yield np.ascontiguousarray(array).tobytes()
    except (TypeError, ValueError, RuntimeError):  # a key, a tracer, an array of several processes
        yield f"{type(value).__qualname__}{getattr(value, 'shape', '')}".encode()


def _constants(code: types.CodeType) -> Iterator[bytes]:
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _constants(constant)
        elif isinstance(constant, int | float | complex) and not isinstance(constant, bool):
            yield repr(constant).encode()
