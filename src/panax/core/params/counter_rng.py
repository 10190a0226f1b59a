"""Counter-based random bits: a hash of counters, computed where used and independent of the device."""

import zlib

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, UInt32


def mix(h: UInt32[Array, "..."]) -> UInt32[Array, "..."]:
    """Apply the finalizer of MurmurHash3, a bijection of 32-bit words; each input bit flips half of the
    output bits.
    """
    h = (h ^ (h >> 16)) * jnp.uint32(0x85EBCA6B)
    h = (h ^ (h >> 13)) * jnp.uint32(0xC2B2AE35)
    return h ^ (h >> 16)


def to_centered_uniform(bits: UInt32[Array, "..."]) -> Float[Array, "..."]:
    """Map 32 random bits each to evenly spaced floats strictly between -1 and 1, excluding 0."""
    signed = (bits >> 8).astype(jnp.int32) - 2**23
    return (signed.astype(jnp.float32) + 0.5) * jnp.float32(2.0**-23)


def element_bits(name: str, count: jax.Array, indices: list[jax.Array]) -> UInt32[Array, "..."]:
    """Return 32 random bits per array element, from the array's name, a count (such as of updates) and the
    element's index.

    Args:
        indices: For each dimension, the index in the global array, in shapes that broadcast to the array's.
    """
    h = mix(jnp.asarray(count).astype(jnp.uint32) ^ jnp.uint32(zlib.crc32(name.encode())))
    for dim, place in enumerate(indices):
        # Each round is keyed, so that two counts or dimensions never see shifted copies of the same bits.
        h = mix((h ^ jnp.uint32(0x9E3779B9 * (dim + 1) & 0xFFFFFFFF)) + place.astype(jnp.uint32))
    return h
