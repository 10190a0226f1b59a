"""The experts' feed-forward in one loop gives what a dense one of each expert does, and its gradients."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from panax.kernels.grouped.feed_forward import FeedForwardMatrices, chunked_feed_forward, chunked_feed_forward_gradients
from panax.kernels.grouped.grouped_matmul import Groups, aligned_row_count

EMBED, FFN, TILE = 12, 20, 8


def plain(rows, weight, matrices, expert):
    """Every expert on every row, by its own mask."""
    total = jnp.zeros_like(rows)
    for e in range(matrices.up.shape[0]):
        up = rows @ matrices.up[e]
        hidden = jax.nn.silu(up) if matrices.gate is None else jax.nn.silu(rows @ matrices.gate[e]) * up
        mine = jnp.asarray(expert == e, jnp.float32)[:, None]
        total = total + mine * ((hidden * weight[:, None]) @ matrices.down[e])
    return total


@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("sizes", [[5, 0, 30, 1], [0, 0, 36, 0], [9, 9, 9, 9]], ids=["skewed", "all to one", "even"])
def test_equals_each_expert_alone(gated, sizes):
    count, rng = sum(sizes), np.random.default_rng(0)
    groups = Groups(jnp.asarray(sizes, jnp.int32), aligned_row_count(count, len(sizes), TILE), TILE)
    expert = np.full(groups.rows, -1)
    for e, (start, size) in enumerate(zip(groups.starts.tolist(), sizes)):
        expert[start : start + size] = e

    def normal(*shape):
        return jnp.asarray(rng.standard_normal(shape), jnp.float32)

    filled = jnp.asarray(expert >= 0, jnp.float32)
    rows, dy = (normal(groups.rows, EMBED) * filled[:, None] for _ in range(2))
    weight = normal(groups.rows) * filled
    shapes = ((len(sizes), EMBED, FFN), (len(sizes), EMBED, FFN), (len(sizes), FFN, EMBED))
    gate, up, down = (normal(*shape) for shape in shapes)
    matrices = FeedForwardMatrices(gate if gated else None, up, down)

    y, inner = chunked_feed_forward(jax.nn.silu, rows, weight, matrices, groups)
    # Rows of unused tiles are unspecified.
    y = jnp.where(jnp.asarray(expert >= 0)[:, None], y, 0.0)
    gradients = chunked_feed_forward_gradients(jax.nn.silu, rows, weight, inner, matrices, groups, dy)
    expected, pull_plain = jax.vjp(lambda r, w, m: plain(r, w, m, expert), rows, weight, matrices)
    actual, wanted = (jax.tree.leaves((y, gradients)), jax.tree.leaves((expected, pull_plain(dy))))
    assert len(actual) == len(wanted) == (6 if gated else 5)
    for a, b in zip(actual, wanted):
        used = np.asarray(expert >= 0) if a.shape[0] == groups.rows else slice(None)
        # Float32 sums of at most 36 products, three deep.
        np.testing.assert_allclose(a[used], b[used], atol=2e-6 * max(1.0, float(jnp.abs(b).max())))
