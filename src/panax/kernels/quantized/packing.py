"""Packing of two 4-bit codes into a byte."""

import jax.numpy as jnp
from jaxtyping import Array, Int8, UInt8


def pack(codes: Int8[Array, "*dims size"]) -> UInt8[Array, "*dims half"]:
    """Pack neighbors along the last dimension into one byte, the first in its low half.

    Args:
        codes: From -8 to 7.

    Raises:
        ValueError: The last dimension is odd.

    >>> pack(jnp.array([1, -1, 7, -8], jnp.int8)).tolist()
    [241, 135]
    """
    if codes.ndim == 0 or codes.shape[-1] % 2:
        raise ValueError(
            f"4-bit codes are packed two to a byte along the last dimension, and the shape is {codes.shape}; make "
            "its size even"
        )
    nibbles = codes.astype(jnp.uint8) & jnp.uint8(0xF)
    return nibbles[..., ::2] | nibbles[..., 1::2] << 4


def unpack(packed: UInt8[Array, "*dims half"]) -> Int8[Array, "*dims size"]:
    """Invert `pack`.

    >>> unpack(jnp.array([241, 135], jnp.uint8)).tolist()
    [1, -1, 7, -8]
    """
    both = jnp.stack([packed << 4, packed & jnp.uint8(0xF0)], -1).reshape(*packed.shape[:-1], -1)
    # The sign bit is the byte's: an arithmetic shift extends it.
    return both.astype(jnp.int8) >> 4
