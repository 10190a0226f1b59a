"""Admission of islands' updates to a round: those that are complete, finite, of this model, and not far
larger than usual.

The island that decides a round applies these checks to all updates and records the result with its reasons.
All other islands read the record, so every island omits the same updates.
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
from ..system.binary_reader import read_number

Arrays = Mapping[str, npt.NDArray[np.generic]]

OUTLIER_FACTOR = 16.0
"""An update is too large if its norm exceeds this multiple of the largest norm of recent rounds and of this
round's smaller half.
"""

_MOST_HEADER_BYTES = 1 << 28


class Update(NamedTuple):
    """A complete update of an island: how far its parameters have moved.

    Attributes:
        digest: Digest of the file's bytes.
        base: Digest of the parameters that the island started from.
        arrays: The arrays as sent, possibly encoded.
    """

    digest: str
    base: str
    arrays: Arrays


def compute_digest(arrays: Arrays) -> str:
    """Return a digest of arrays by name, including their dtypes and shapes."""
    found = xxhash.xxh3_64()
    for name in sorted(arrays):
        array = np.ascontiguousarray(arrays[name])
        found.update(f"{name} {array.dtype} {array.shape};".encode())
        found.update(array.reshape(-1).view(np.uint8).data)
    return found.hexdigest()


def parse_update(data: bytes) -> Update:
    """Parse an update, or the result of a round, from a safetensors file, and verify the digest in its
    header.

    Raises:
        ValueError: The file is truncated, damaged, or not an update.
    """
    size = read_number(data, 0, "<Q")
    if not 0 < size <= min(len(data) - 8, _MOST_HEADER_BYTES):
        raise ValueError(f"it is cut short: {len(data)} bytes, with a header of {size}")
    about = json_reader.parse_as(dict, data[8 : 8 + size]).get("__metadata__")
    if not isinstance(about, dict):
        raise ValueError("its header has no metadata")
    try:
        arrays = load(data)
    except (SafetensorError, ValueError, TypeError, KeyError, OverflowError) as error:
        raise ValueError(f"it is not a safetensors file: {error}") from error
    if compute_digest(arrays) != about.get("digest"):
        raise ValueError("its numbers are not those that its writer named the digest of")
    return Update(xxhash.xxh3_64_hexdigest(data), str(about.get("base", "")), arrays)


def update_norm(moved: Mapping[str, npt.NDArray[np.float32]]) -> float:
    """Return the Euclidean norm of an update.

    Raises:
        ValueError: An element is not finite.
    """
    total = 0.0
    for name, array in moved.items():
        if not np.isfinite(array).all():
            raise ValueError(f"{name} is not finite")
        flat = array.astype(np.float64).reshape(-1)
        total += float(flat @ flat)
    return math.sqrt(total)


def find_outliers(norms: Mapping[Any, float], history: Sequence[float]) -> dict[Any, str]:
    """Return the updates that are far larger than usual, with the reasons.

    Args:
        norms: Norms of a round's updates.
        history: Norms of the updates that counted in earlier rounds.

    >>> find_outliers({0: 1.0, 1: 1e6}, [])
    {1: 'its norm is 1e+06, more than 16 times 1'}
    >>> find_outliers({0: 1e6, 1: 2e6}, [1.0])  # all have: the learning rate rose
    {}
    """
    if not norms:
        return {}
    # The lower median: of two, the smaller one. A single update is compared only with earlier rounds.
    typical = sorted(norms.values())[(len(norms) - 1) // 2] if len(norms) > 1 else 0.0
    usual_norm = max(typical, *history, 0.0)
    if usual_norm == 0.0:  # Nothing to compare with.
        return {}
    return {
        who: f"its norm is {norm:.3g}, more than {OUTLIER_FACTOR:g} times {usual_norm:.3g}"
        for who, norm in norms.items()
        if norm > OUTLIER_FACTOR * usual_norm
    }
