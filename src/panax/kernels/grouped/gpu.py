"""Grouped matmuls for GPUs in Pallas (Triton): one program for each block of the output, reading its group's
matrix.

No tile of rows contains two groups, so that a program reads one matrix, looked up in a small array with the
group of each tile. Programs of unused tiles return immediately. Each block of the output is written by one
program, without atomic additions, so results are deterministic.

Compiled ahead of time for the H100 and interpreted on the CPU; not yet timed on a GPU: the block sizes are
those that Triton's own matmul is tuned to there. See `kernels.attention.gpu` on jax 0.12's deprecation of such
kernels.
"""

import dataclasses
import functools
import math

import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt
from jax.typing import DTypeLike
from jaxtyping import Float

from panax.kernels.grouped.rows import Groups
from panax.kernels.varying_axes import output_struct, vary_alike


@dataclasses.dataclass(frozen=True, kw_only=True)
class GroupedTileSizes:
    """Sizes of one program's blocks in registers and shared memory; powers of two, at least 16.

    Attributes:
        rows: Rows of the output; for `grouped_outer`, of its `k`.
        columns: Columns of the output.
        inner: Size of each step along the contracted dimension.
        together: Number of programs along the output's rows that run concurrently over all of its columns, so
            that they find the same blocks of the operands in the L2 cache.
    """

    rows: int = 128
    columns: int = 256
    inner: int = 64
    together: int = 8
    num_warps: int = 8
    num_stages: int = 3

    @staticmethod
    def for_dtype(dtype: DTypeLike) -> "GroupedTileSizes":
        """Return blocks that fit the shared memory of an A100 and of newer GPUs."""
        # Full float32 matmuls run on the ordinary cores, from registers.
        return (
            GroupedTileSizes()
            if jnp.dtype(dtype).itemsize <= 2
            else GroupedTileSizes(rows=64, columns=64, inner=32, num_warps=4)
        )


def gpu_product(
    x: Float[Array, "row k"],
    w: Float[Array, "group _ _"],
    groups: Groups,
    *,
    transposed: bool,
    out_dtype: DTypeLike,
    blocks: GroupedTileSizes | None = None,
    interpret: bool = False,
) -> Float[Array, "row n"]:
    """Compute `grouped_product`.

    Args:
        interpret: Run the kernel as ordinary JAX operations on any backend, slowly.
    """
    blocks = blocks or GroupedTileSizes.for_dtype(x.dtype)
    num_groups, (num_rows, k), n = w.shape[0], x.shape, w.shape[1 if transposed else 2]
    # A block of rows must be within a tile.
    size_m = math.gcd(blocks.rows, groups.tile)
    size_n, size_k = (min(size, _block_that_covers(dim)) for size, dim in ((blocks.columns, n), (blocks.inner, k)))
    num_m, num_n = num_rows // size_m, pl.cdiv(n, size_n)
    group_of_block = jnp.repeat(groups.tile_group, groups.tile // size_m, total_repeat_length=num_m)
    x, w, group_of_block = vary_alike(x, w, group_of_block)

    def kernel(x_ref, w_ref, group_ref, out_ref):
        m, j = _place(pl.program_id(0), num_m, num_n, blocks.together)
        group = group_ref[m]

        @pl.when(group < num_groups)
        def _():
            rows, columns = pl.ds(m * size_m, size_m), pl.ds(j * size_n, size_n)

            def body(i, total):
                inner = pl.ds(i * size_k, size_k)
                left = _load(x_ref.at[rows, inner], (None, _within(i, size_k, k)))
                if transposed:
                    right = _load(w_ref.at[group, columns, inner], (_within(j, size_n, n), _within(i, size_k, k))).T
                else:
                    right = _load(w_ref.at[group, inner, columns], (_within(i, size_k, k), _within(j, size_n, n)))
                return total + plt.dot(left, right, allow_tf32=False)

            total = lax.fori_loop(0, pl.cdiv(k, size_k), body, jnp.zeros((size_m, size_n), jnp.float32))
            _store(out_ref.at[rows, columns], total.astype(out_dtype), (None, _within(j, size_n, n)))

    return pl.pallas_call(
        kernel,
        grid=(num_m * num_n,),
        out_shape=output_struct((num_rows, n), out_dtype, x),
        compiler_params=plt.CompilerParams(num_warps=blocks.num_warps, num_stages=blocks.num_stages),
        interpret=interpret,
        name="panax_grouped_product",
    )(x, w, group_of_block)


def gpu_outer(
    x: Float[Array, "row k"],
    y: Float[Array, "row n"],
    groups: Groups,
    *,
    out_dtype: DTypeLike,
    blocks: GroupedTileSizes | None = None,
    interpret: bool = False,
) -> Float[Array, "group k n"]:
    """Compute `grouped_outer`. Arguments as in `gpu_product`."""
    blocks = blocks or GroupedTileSizes.for_dtype(x.dtype)
    num_groups, k, n = groups.sizes.shape[0], x.shape[1], y.shape[1]
    size_m, size_n = (min(size, _block_that_covers(dim)) for size, dim in ((blocks.rows, k), (blocks.columns, n)))
    size_k = math.gcd(blocks.inner, groups.tile)
    num_m, num_n = pl.cdiv(k, size_m), pl.cdiv(n, size_n)
    first = groups.starts // size_k
    steps = jnp.stack([first, first + groups.tiles * (groups.tile // size_k)], axis=1)
    x, y, steps = vary_alike(x, y, steps)

    def kernel(x_ref, y_ref, steps_ref, out_ref):
        group = pl.program_id(1)
        m, j = _place(pl.program_id(0), num_m, num_n, blocks.together)
        rows, columns = pl.ds(m * size_m, size_m), pl.ds(j * size_n, size_n)

        def body(i, total):
            inner = pl.ds(i * size_k, size_k)
            left = _load(x_ref.at[inner, rows], (None, _within(m, size_m, k))).T
            right = _load(y_ref.at[inner, columns], (None, _within(j, size_n, n)))
            return total + plt.dot(left, right, allow_tf32=False)

        start = jnp.zeros((size_m, size_n), jnp.float32)
        total = lax.fori_loop(steps_ref[group, 0], steps_ref[group, 1], body, start).astype(out_dtype)
        _store(out_ref.at[group, rows, columns], total, (_within(m, size_m, k), _within(j, size_n, n)))

    return pl.pallas_call(
        kernel,
        # Programs start in the order of the first dimension.
        grid=(num_m * num_n, num_groups),
        out_shape=output_struct((num_groups, k, n), out_dtype, x),
        compiler_params=plt.CompilerParams(num_warps=blocks.num_warps, num_stages=blocks.num_stages),
        interpret=interpret,
        name="panax_grouped_outer",
    )(x, y, steps)


def _place(program, num_m: int, num_n: int, together: int):
    """Return the block of a program: `together` blocks of rows process all columns before the next ones
    start."""
    band = together * num_n
    first = program // band * together
    height = jnp.minimum(num_m - first, together)
    return first + program % band % height, program % band // height


def _block_that_covers(dim: int) -> int:
    return max(16, pl.next_power_of_2(dim))


def _within(i, size: int, dim: int) -> Array | None:
    """Return the mask of the elements of block `i` within the dimension; None if every block lies within it."""
    return None if dim % size == 0 else i * size + jnp.arange(size) < dim


def _mask(shape: tuple[int, ...], within: tuple[Array | None, Array | None]) -> Array | None:
    rows, columns = within
    masks = [] if rows is None else [rows[:, None]]
    masks += [] if columns is None else [columns[None, :]]
    return functools.reduce(jnp.logical_and, (jnp.broadcast_to(mask, shape) for mask in masks)) if masks else None


def _load(ref, within):
    mask = _mask(ref.shape, within)
    return ref[...] if mask is None else plt.load(ref, mask=mask, other=0)


def _store(ref, value, within):
    plt.store(ref, value, mask=_mask(value.shape, within))
