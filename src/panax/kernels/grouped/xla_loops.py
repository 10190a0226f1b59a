"""Grouped matmuls as loops in XLA: the fast implementation on the CPU, and the one for all cases that the
kernels don't support.

Both matmuls are cases of `map_groups`, which runs any function over each group's rows in few large chunks. In
float32 a whole feed-forward inside one `map_groups` is a little faster on the CPU than its separate matmuls:
no intermediate array is written to memory. In bfloat16 it is slower, as XLA:CPU only uses its fast matmuls in
the simplest contexts.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array, Float, PyTree, Shaped

from panax.kernels.grouped.rows import Groups
from panax.kernels.precision import accumulation_dtype

# Beyond it, XLA's matmuls on CPU do not get faster.
_LARGEST_CHUNK = 1024
# One more step costs about as much as this many more rows in the same step.
_ROWS_OF_A_STEP = 48
_FEW_ROWS = 2048


def map_groups(
    function: Callable[[PyTree, PyTree], tuple[PyTree, PyTree]],
    rows: PyTree[Float[Array, "row ..."]],
    matrices: PyTree[Shaped[Array, "group ..."]],
    groups: Groups,
) -> tuple[PyTree[Float[Array, "row ..."]], PyTree[Float[Array, "group ..."]]]:
    """Run a function over every group's rows, a chunk at a time; time is proportional to the used rows.

    Args:
        function: Function of one group's `matrices` (without the group's dimension) and a chunk of its
            `rows`. Returns a result for each row, and the chunk's contribution to the sums over a group's
            rows. Each row's result must depend only on that row, and zero rows must add nothing to the sums.

    Returns:
        The results of each row, unspecified for the rows of unused tiles; and the sums of each group, zeros
        for one without rows.
    """
    num_groups, starts = groups.sizes.shape[0], groups.starts
    ends = starts + groups.sizes.astype(starts.dtype)
    of_rows, of_groups = jax.eval_shape(
        function,
        jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape[1:], a.dtype), matrices),
        jax.tree.map(lambda a: jax.ShapeDtypeStruct((groups.tile, *a.shape[1:]), a.dtype), rows),
    )
    results = jax.tree.map(lambda a: jnp.zeros((groups.rows, *a.shape[1:]), a.dtype), of_rows)
    sums = jax.tree.map(lambda a: jnp.zeros((num_groups, *a.shape), a.dtype), of_groups)
    # Groups without rows are last, and are not visited.
    order = jnp.argsort(groups.sizes == 0, stable=True)
    chunks = _chunk_sizes(groups)

    def of_group(i, carry):
        group = order[i]
        group_matrices = jax.tree.map(lambda a: lax.dynamic_index_in_dim(a, group, keepdims=False), matrices)
        start, end = starts[group], ends[group]
        for chunk, smaller in zip(chunks, (*chunks[1:], 0)):
            left = end - start
            count = left // chunk
            left -= count * chunk
            if smaller == 0:
                count += (left > 0).astype(count.dtype)
            else:
                # A chunk that is a little too long beats two shorter ones. The rows of the next group in it
                # are zeros to the function, and its results for them are overwritten in their own turn.
                fits = start + (count + 1) * chunk <= groups.rows
                count += ((left > smaller) & (chunk - left <= _ROWS_OF_A_STEP + left // 16) & fits).astype(count.dtype)
            carry = lax.fori_loop(0, count, _step(function, rows, group_matrices, group, start, end, chunk), carry)
            start = jnp.minimum(start + count * chunk, end)
        return carry

    return lax.fori_loop(0, (groups.sizes > 0).sum(dtype=jnp.int32), of_group, (results, sums))


def blocked_product(
    x: Float[Array, "row k"], w: Float[Array, "group _ _"], groups: Groups, *, transposed: bool, out_dtype: DTypeLike
) -> Float[Array, "row n"]:
    """Compute `grouped_product`."""
    dims = (((1,), (1 if transposed else 0,)), ((), ()))

    def function(matrix, chunk):
        product = lax.dot_general(chunk, matrix, dims, preferred_element_type=accumulation_dtype(x.dtype))
        return product.astype(out_dtype), ()

    return map_groups(function, x, w, groups)[0]


def blocked_outer(
    x: Float[Array, "row k"], y: Float[Array, "row n"], groups: Groups, *, out_dtype: DTypeLike
) -> Float[Array, "group k n"]:
    """Compute `grouped_outer`."""

    def function(once, chunk):
        left, right = chunk
        # As of jax 0.10.2 XLA:CPU multiplies bfloat16 fast only as stored, and folds a transpose into the
        # matmul, at a fifth of the speed; a loop, even of only one step, prevents that.
        steps = once if left.dtype == jnp.bfloat16 else 1
        left = lax.fori_loop(0, steps, lambda _, __: left.T, jnp.zeros_like(left.T))
        return (), jnp.matmul(left, right, preferred_element_type=accumulation_dtype(x.dtype))

    # 1 for every group that is visited, which the compiler doesn't know.
    once = jnp.minimum(groups.sizes, 1)
    return map_groups(function, (x, y), once, groups)[1].astype(out_dtype)


def _step(function, rows, group_matrices, group, start, end, chunk: int):
    """Return the loop's body for chunks of one size, beginning at `start`."""

    def step(i, carry):
        results, sums = carry
        at = start + i * chunk
        mine = at + jnp.arange(chunk) < end

        def take(a):
            part = lax.dynamic_slice_in_dim(a, at, chunk)
            return jnp.where(mine.reshape(chunk, *[1] * (a.ndim - 1)), part, jnp.zeros_like(part))

        of_rows, of_group = function(group_matrices, jax.tree.map(take, rows))
        results = jax.tree.map(lambda a, part: lax.dynamic_update_slice_in_dim(a, part, at, 0), results, of_rows)
        return results, jax.tree.map(lambda a, part: a.at[group].add(part), sums, of_group)

    return step


def _chunk_sizes(groups: Groups) -> tuple[int, ...]:
    """Return the numbers of rows of the loops' steps, descending: dense around a group's expected size, and
    finally one tile, which always fits."""
    expected = min(groups.rows // groups.sizes.shape[0], _LARGEST_CHUNK)
    # Each size is a copy of the function to compile: too expensive for small work.
    eighths = (10, 8, 6, 4, 2, 1) if groups.rows > _FEW_ROWS else (8,)
    candidates = (_LARGEST_CHUNK, *(expected * n // 8 for n in eighths))
    # Multiples of 16, for vector units.
    sizes = {size // 16 * 16 for size in candidates}
    return (*sorted((size for size in sizes if groups.tile < size <= groups.rows), reverse=True), groups.tile)
