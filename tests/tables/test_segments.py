"""Sums of rows by their numbers, by blocks: the result of a scatter, without one."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from panax.core.layout.target import Target
from panax.spmd.segments import segment_sums, sums_by_blocks


@pytest.mark.parametrize(("size", "most"), [(1, 1), (7, 5000), (2100, 40)])
def test_sums_by_blocks_are_sums(size, most):
    rng = np.random.default_rng(size + most)
    # Whole numbers, whose sums are exact in any order; some segments are empty, and some rows are of none.
    rows = rng.integers(-9, 9, (size, 3)).astype(np.float32)
    segment = np.minimum(rng.zipf(1.2, size) - 1, most).astype(np.int32)
    expected = np.zeros((most + 1, 3), np.float32)
    np.add.at(expected, segment, rows)
    sums = jax.jit(segment_sums, static_argnames=("count", "target"))
    actual = sums(jnp.asarray(rows), jnp.asarray(segment), most, target=Target("cuda"))
    np.testing.assert_array_equal(actual, expected[:most])
    ordered = np.argsort(segment, kind="stable")
    by_four = jax.jit(sums_by_blocks, static_argnames=("count", "block"))
    small = by_four(jnp.asarray(rows[ordered]), jnp.asarray(segment[ordered]), most, block=4)
    np.testing.assert_array_equal(small, expected[:most])


def test_on_a_gpu_nothing_is_added_by_atomics():
    def lowered(target: Target) -> str:
        function = jax.jit(lambda rows, segment: segment_sums(rows, segment, 50, target=target))
        return function.lower(jnp.zeros((100, 4)), jnp.zeros(100, jnp.int32)).as_text()

    adding = "stablehlo.add %arg2, %arg3 : tensor<f32>"
    assert adding in lowered(Target("cpu")) and adding not in lowered(Target("cuda"))
