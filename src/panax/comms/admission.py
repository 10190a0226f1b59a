"""Which islands' updates count at a meeting: those that are whole, finite, of this model, and not far larger than usual.

Whoever decides a round asks this for all, and writes down the answer with its reasons; all others read it, so every island
leaves out the same ones.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import xxhash
from safetensors import SafetensorError
from safetensors.numpy import load

from ..system import json_reader
from ..system.binary_reader import number_at

Arrays = Mapping[str, npt.NDArray[np.generic]]

FACTOR = 16.0
"""An update is too large if its norm is so many times the largest of the last rounds, and of the smaller half of this one."""

_MOST_HEADER_BYTES = 1 << 28


class Update(NamedTuple):
    """What an island has moved by, whole.

    Attributes:
        digest: Of the bytes that it wrote.
        base: The digest of what it began from.
        arrays: As they travelled.
    """

    digest: str
    base: str
    arrays: Arrays


def digest_of(arrays: Arrays) -> str:
    """A digest of numbers by name, their types and shapes included."""
    found = xxhash.xxh3_64()
    for name in sorted(arrays):
        array = np.ascontiguousarray(arrays[name])
        found.update(f"{name} {array.dtype} {array.shape};".encode())
        found.update(array.reshape(-1).view(np.uint8).data)
    return found.hexdigest()


def whole(data: bytes) -> Update:
    """The update in a safetensors file, or what was agreed on: its arrays are those that its writer named a digest of.

    Raises:
        ValueError: It is torn, damaged, or something else.
    """
    size = number_at(data, 0, "<Q")
    if not 0 < size <= min(len(data) - 8, _MOST_HEADER_BYTES):
        raise ValueError(f"it is cut short: {len(data)} bytes, with a header of {size}")
    about = json_reader.parse_as(dict, data[8 : 8 + size]).get("__metadata__")
    if not isinstance(about, dict):
        raise ValueError("its header has no metadata")
    try:
        arrays = load(data)
    except (SafetensorError, ValueError, TypeError, KeyError, OverflowError) as error:
        raise ValueError(f"it is not a safetensors file: {error}") from error
    if digest_of(arrays) != about.get("digest"):
        raise ValueError("its numbers are not those that its writer named the digest of")
    return Update(xxhash.xxh3_64_hexdigest(data), str(about.get("base", "")), arrays)


def norm_of(moved: Mapping[str, npt.NDArray[np.float32]]) -> float:
    """The Euclidean norm of an update.

    Raises:
        ValueError: A number in it is not finite.
    """
    total = 0.0
    for name, array in moved.items():
        if not np.isfinite(array).all():
            raise ValueError(f"{name} is not finite")
        flat = array.astype(np.float64).reshape(-1)
        total += float(flat @ flat)
    return math.sqrt(total)


def too_large(norms: Mapping[Any, float], history: Sequence[float]) -> dict[Any, str]:
    """Which updates are far larger than usual, and why.

    Args:
        norms: Of the updates of a round.
        history: Of those that counted in the rounds before it.

    >>> too_large({0: 1.0, 1: 1e6}, [])
    {1: 'its norm is 1e+06, more than 16 times 1'}
    >>> too_large({0: 1e6, 1: 2e6}, [1.0])  # all have: the learning rate rose
    {}
    """
    if not norms:
        return {}
    # Of two, the smaller one; alone, an update is compared with the rounds before it only.
    typical = sorted(norms.values())[(len(norms) - 1) // 2] if len(norms) > 1 else 0.0
    most = max(typical, *history, 0.0)
    if most == 0.0:  # nothing to compare with
        return {}
    return {
        who: f"its norm is {norm:.3g}, more than {FACTOR:g} times {most:.3g}"
        for who, norm in norms.items()
        if norm > FACTOR * most
    }
