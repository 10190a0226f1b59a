"""Distributions of rows over groups, arrays to multiply, and the error that float32 may make."""

import jax.numpy as jnp
import numpy as np

from panax.kernels.grouped.grouped_matmul import Groups, aligned_row_count

SIZES = {
    "balanced": [25, 25, 25, 25, 25, 25, 25, 25],
    "imbalanced": [171, 1, 0, 16, 3, 0, 8, 1],
    "the last takes nearly all": [0, 0, 1, 0, 0, 0, 0, 199],
    "all in one": [0, 0, 0, 200, 0, 0, 0, 0],
    "none": [0, 0, 0, 0, 0, 0, 0, 0],
    "worst for the buffer": [193, 1, 1, 1, 1, 1, 1, 1],
}
ROWS, GROUPS = 200, 8


def groups_of(sizes, tile: int, *, unused_tiles: int = 0) -> Groups:
    total = max(ROWS, sum(sizes))
    rows = aligned_row_count(total, len(sizes), tile) + unused_tiles * tile
    return Groups(sizes=jnp.asarray(sizes, jnp.int32), rows=rows, tile=tile)


def sorted_rows(groups: Groups, dim: int, seed: int, *, unused: float = np.nan) -> np.ndarray:
    """Random rows, zeros in gaps, and `unused` in unused tiles."""
    values = np.random.default_rng(seed).normal(size=(groups.rows, dim)).astype(np.float32)
    for start, size, tiles in zip(*(np.asarray(a) for a in (groups.starts, groups.sizes, groups.tiles))):
        values[start + size : start + tiles * groups.tile] = 0
    values[int(groups.used_tiles) * groups.tile :] = unused
    return values


def matrices(num_groups: int, k: int, n: int) -> np.ndarray:
    return np.random.default_rng(7).normal(size=(num_groups, k, n)).astype(np.float32)


def spans(groups: Groups) -> list[tuple[int, int]]:
    starts, tiles = np.asarray(groups.starts), np.asarray(groups.tiles)
    return [(int(start), int(start + count * groups.tile)) for start, count in zip(starts, tiles)]


def assert_product(actual, x, w, groups: Groups, tolerance: float = 1e-6) -> None:
    """The used rows equal a loop over the groups in float64, to `tolerance` of the sum of the terms' magnitudes.

    A float32 sum of k terms errs by about sqrt(k) * 6e-8 of that, for the k up to 200 of these tests by 8e-7.
    """
    actual = np.asarray(actual, np.float64)
    for (start, end), matrix in zip(spans(groups), w.astype(np.float64)):
        rows = x[start:end].astype(np.float64)
        assert (np.abs(actual[start:end] - rows @ matrix) <= tolerance * (np.abs(rows) @ np.abs(matrix))).all()


def assert_outer(actual, x, y, groups: Groups, tolerance: float = 1e-6) -> None:
    """As `assert_product`."""
    actual = np.asarray(actual, np.float64)
    for (start, end), found in zip(spans(groups), actual):
        left, right = (a[start:end].astype(np.float64) for a in (x, y))
        assert (np.abs(found - left.T @ right) <= tolerance * (np.abs(left).T @ np.abs(right))).all()
