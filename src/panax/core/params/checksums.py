"""Checksums of parameters, computed on their own devices: the same on every mesh."""

import hashlib
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from .axes import named_leaves


def compute_checksums(params: Any) -> dict[str, int]:
    """Return a 32-bit checksum of each leaf's bits, by its dotted name.

    Each value is hashed with its index, and the hashes are added modulo 2**32: no order of the sum changes the result, and any
    change of a single value changes it.
    """
    leaves = named_leaves(params)
    sums = jax.jit(_checksum_all, out_shardings={name: _replicated(leaf) for name, leaf in leaves.items()})(leaves)
    return {name: int(total) for name, total in jax.device_get(sums).items()}


def fingerprint_weights(params: Any) -> str:
    """Return a hash of all parameters' names and values, which does not depend on the mesh."""
    return fingerprint_checksums(compute_checksums(params))


def fingerprint_checksums(checksums: Mapping[str, int]) -> str:
    """Return a hash of checksums by name."""
    digest = hashlib.blake2b(digest_size=12)
    for name, total in sorted(checksums.items()):
        digest.update(f"{name}:{total};".encode())
    return digest.hexdigest()


def _replicated(leaf: Any) -> NamedSharding | None:
    sharding = getattr(leaf, "sharding", None)
    return NamedSharding(sharding.mesh, PartitionSpec()) if isinstance(sharding, NamedSharding) else None


def _checksum_all(leaves: dict[str, jax.Array]) -> dict[str, jax.Array]:
    return {name: _checksum(leaf) for name, leaf in leaves.items()}


def _checksum(leaf: jax.Array) -> jax.Array:
    if not jnp.issubdtype(leaf.dtype, jnp.integer):
        leaf = jax.lax.bitcast_convert_type(leaf, jnp.dtype(f"uint{leaf.dtype.itemsize * 8}"))
    bits = leaf.astype(jnp.uint32)
    index = jnp.arange(bits.size, dtype=jnp.uint32).reshape(bits.shape)
    return _mix(bits ^ _mix(index + jnp.uint32(1))).sum(dtype=jnp.uint32)


def _mix(bits: jax.Array) -> jax.Array:
    """Map 32-bit words one to one, so that each bit of the result depends on all bits.

    Source: the finalizer of MurmurHash3 (public domain).
    """
    bits = (bits ^ (bits >> 16)) * jnp.uint32(0x85EBCA6B)
    bits = (bits ^ (bits >> 13)) * jnp.uint32(0xC2B2AE35)
    return bits ^ (bits >> 16)
