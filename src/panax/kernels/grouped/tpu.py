"""Grouped matmuls for TPUs by megablox, the Pallas kernels that ship with jax.

Compiled ahead of time for v5e and v5p and interpreted on the CPU; not yet timed on a TPU. Float32 operands
are multiplied at the default precision of such kernels.
"""

import math
from collections.abc import Callable

import jax
from jax.experimental.pallas.ops.tpu.megablox.gmm import gmm, tgmm
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from panax.kernels.grouped.rows import Groups

# Blocks of three arrays, each double-buffered, and the sum fit the 16 MiB that a v5e gives a program.
_BLOCK = 512


def tpu_product(
    x: Float[Array, "row k"],
    w: Float[Array, "group _ _"],
    groups: Groups,
    *,
    transposed: bool,
    out_dtype: DTypeLike,
    interpret: bool = False,
) -> Float[Array, "row n"]:
    """Compute `grouped_product`.

    Args:
        interpret: Run the kernel as ordinary JAX operations on any backend, slowly.
    """
    k, n = x.shape[1], w.shape[1 if transposed else 2]
    return _run(
        gmm,
        x,
        w,
        groups.tiles * groups.tile,
        preferred_element_type=out_dtype,
        # Wider blocks read `x` fewer times.
        tiling=(_rows(groups), _block(k), _block(n, _BLOCK if x.dtype.itemsize > 2 else 2 * _BLOCK)),
        transpose_rhs=transposed,
        interpret=interpret,
    )


def tpu_outer(
    x: Float[Array, "row k"],
    y: Float[Array, "row n"],
    groups: Groups,
    *,
    out_dtype: DTypeLike,
    interpret: bool = False,
) -> Float[Array, "group k n"]:
    """Compute `grouped_outer`. Arguments as in `tpu_product`."""
    return _run(
        tgmm,
        x.T,
        y,
        groups.tiles * groups.tile,
        preferred_element_type=out_dtype,
        tiling=(_rows(groups), _block(x.shape[1]), _block(y.shape[1])),
        interpret=interpret,
    )


def _run(kernel: Callable[..., Array], *arrays: Array, **options) -> Array:
    # As of jax 0.10.2 megablox mixes dtypes, which a program may have disallowed.
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        return kernel(*arrays, **options)


def _rows(groups: Groups) -> int:
    return math.gcd(groups.tile, _BLOCK)


def _block(dim: int, largest: int = _BLOCK) -> int:
    # Registers hold 128 columns.
    return min(largest, -(-dim // 128) * 128)
