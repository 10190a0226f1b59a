"""Permutation that spreads a stack's rows over equal parts, so that any number of devices that divides the
parts holds an equal share of each table."""

import math

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

from ...core.params.counter_rng import mix

MAX_POWER_OF_TWO = 4096
"""Maximum power of two in the number of parts."""

ODD_FACTORS = (3 * 5 * 7, 3 * 5, 3, 1)
"""Odd factors of the number of parts: a job that has lost one of 4, 6 or 8 hosts still divides them."""

MIN_POWER_OF_TWO = 256
"""Minimum power of two that must remain for an odd factor to be used."""

MAX_PARTS = MAX_POWER_OF_TWO * ODD_FACTORS[0]

DIGIT = 1024
"""Base in which values up to `MAX_PARTS` are multiplied as two digits, so that all intermediates fit
int32."""


def choose_num_parts(rows: int) -> int:
    """Choose a number of parts for which padding costs at most a sixteenth of the rows.

    >>> choose_num_parts(10_000_000), choose_num_parts(1000)
    (430080, 32)
    """
    max_parts = max(rows // 16, 1)
    odd = next(odd for odd in ODD_FACTORS if odd * MIN_POWER_OF_TWO <= max_parts or odd == 1)
    return odd * min(MAX_POWER_OF_TWO, 2 ** int(math.log2(max_parts // odd)))


def pad_rows_to_parts(rows: int, parts: int) -> int:
    """Round the number of rows up to a multiple of the parts."""
    return -(-rows // parts) * parts


def mix_rows(row: Int[Array, "*rows"], rows: int, parts: int) -> Int[Array, "*rows"]:
    """Return the permuted index of a row: adjacent rows go to distant parts, with another starting part in
    each round.

    A bijection of `range(rows)` that is the same on every mesh. Frequent ids, which have the lowest numbers
    in vocabularies, are therefore spread over devices, as are ids with a stride.

    Args:
        parts: Number of parts, at most `MAX_PARTS`; divides `rows`.

    >>> sorted(mix_rows(jnp.arange(24), 24, 12).tolist()) == list(range(24))
    True
    """
    if parts == 1:
        return row
    high, low = row // parts, row % parts
    part = (_times(low, _apart(parts), parts) + _turn(high, parts)) % parts
    return (part * (rows // parts) + high).astype(row.dtype)


def unmix_rows(place: Int[Array, "*rows"], rows: int, parts: int) -> Int[Array, "*rows"]:
    """Invert `mix_rows`."""
    if parts == 1:
        return place
    each = rows // parts
    high, part = place % each, place // each
    low = _times((part - _turn(high, parts)) % parts, pow(_apart(parts), -1, parts), parts)
    return (high * parts + low).astype(place.dtype)


def _apart(parts: int) -> int:
    """Return the distance between the parts of adjacent rows: close to the golden section, so that a few rows
    are spread too, and coprime to `parts`."""
    start = int(0.618 * parts) | 1
    return next(apart for apart in range(start, 2 * parts + 2) if math.gcd(apart, parts) == 1)


def _times(number: Int[Array, "*rows"], factor: int, parts: int) -> Int[Array, "*rows"]:
    """Multiply modulo `parts`; both operands are smaller than `parts`."""
    high, low = divmod(factor, DIGIT)
    return (number * high % parts * DIGIT + number * low) % parts


def _turn(high: jax.Array, parts: int) -> jax.Array:
    return (mix(high.astype(jnp.uint32)) % jnp.uint32(parts)).astype(jnp.int32)
