"""Rows of a stack dealt out to equal parts, so that any number of devices that divides the parts has its share of each table."""

import math

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

from ..core.counter_hash import mix

TWOS = 4096
"""The most parts that are a power of two."""

ODD = (3 * 5 * 7, 3 * 5, 3, 1)
"""What they are multiplied with: a job that has lost one of 4, 6 or 8 hosts has its share too."""

LEAST_TWOS = 256
"""An odd factor is taken where so many twos are left beside it."""

MOST_PARTS = TWOS * ODD[0]

DIGIT = 1024
"""Numbers up to `MOST_PARTS` are multiplied with each other as two digits, all that is between in int32."""


def parts_for(rows: int) -> int:
    """As many parts as cost no more than a sixteenth of the rows, which are filled up to a multiple of them.

    >>> parts_for(10_000_000), parts_for(1000)
    (430080, 32)
    """
    most = max(rows // 16, 1)
    odd = next(odd for odd in ODD if odd * LEAST_TWOS <= most or odd == 1)
    return odd * min(TWOS, 2 ** int(math.log2(most // odd)))


def pad_rows_to_parts(rows: int, parts: int) -> int:
    """The rows, filled up to a multiple of the parts."""
    return -(-rows // parts) * parts


def mix_rows(row: Int[Array, "*rows"], rows: int, parts: int) -> Int[Array, "*rows"]:
    """A row's place: adjacent rows are dealt out to the parts, far apart, from another one on in each round of dealing.

    A bijection of `range(rows)` that depends on no mesh. Frequent ids, which vocabularies number first, so lie on different
    devices, and those with a stride do too.

    Args:
        parts: Up to `MOST_PARTS`; they divide `rows`.

    >>> sorted(mix_rows(jnp.arange(24), 24, 12).tolist()) == list(range(24))
    True
    """
    if parts == 1:
        return row
    high, low = row // parts, row % parts
    part = (_times(low, _apart(parts), parts) + _turn(high, parts)) % parts
    return (part * (rows // parts) + high).astype(row.dtype)


def unmix_rows(place: Int[Array, "*rows"], rows: int, parts: int) -> Int[Array, "*rows"]:
    """The row at a place: the inverse of `mix_rows`."""
    if parts == 1:
        return place
    each = rows // parts
    high, part = place % each, place // each
    low = _times((part - _turn(high, parts)) % parts, pow(_apart(parts), -1, parts), parts)
    return (high * parts + low).astype(place.dtype)


def _apart(parts: int) -> int:
    """How far adjacent rows are dealt apart: near the golden section, so that few are spread too, and coprime to `parts`."""
    wanted = int(0.618 * parts) | 1
    return next(apart for apart in range(wanted, 2 * parts + 2) if math.gcd(apart, parts) == 1)


def _times(number: Int[Array, "*rows"], factor: int, parts: int) -> Int[Array, "*rows"]:
    """The product modulo `parts`, of numbers below it."""
    high, low = divmod(factor, DIGIT)
    return (number * high % parts * DIGIT + number * low) % parts


def _turn(high: jax.Array, parts: int) -> jax.Array:
    return (mix(high.astype(jnp.uint32)) % jnp.uint32(parts)).astype(jnp.int32)
