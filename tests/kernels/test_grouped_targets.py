"""Grouped products for GPUs and TPUs, from a machine that has neither: kernels interpreted, programs compiled."""

import functools

import jax
import jax.numpy as jnp
import pytest
from grouped_cases import GROUPS, SIZES, assert_outer, assert_product, groups_of, matrices, sorted_rows

from panax.kernels.grouped.gpu import GroupedTileSizes, gpu_outer, gpu_product
from panax.kernels.grouped.grouped_matmul import Groups, aligned_row_count, choose_tile, grouped_outer, grouped_product
from panax.kernels.grouped.tpu import tpu_outer, tpu_product
from panax.plan import parse_target, target_devices
from panax.plan.step import disable_compilation_cache

SMALL = GroupedTileSizes(rows=16, columns=16, inner=16, together=2)


@pytest.fixture(autouse=True)
def nothing_in_the_compilation_cache():
    """Programs for absent devices can be written there, and not read back."""
    with disable_compilation_cache():
        yield


def check(product, outer, groups: Groups, k: int, n: int, **options) -> None:
    x, y, w = sorted_rows(groups, k, 0), sorted_rows(groups, n, 1), matrices(groups.sizes.shape[0], k, n)
    options = {"out_dtype": jnp.float32, "interpret": True, **options}

    def run(function, *arrays, **more):
        return jax.jit(functools.partial(function, **options, **more))(*arrays, groups)

    assert_product(run(product, x, w, transposed=False), x, w, groups)
    assert_product(run(product, y, w, transposed=True), y, w.swapaxes(1, 2), groups)
    assert_outer(run(outer, x, y), x, y, groups)


# Dimensions that are multiples of a block, and ones that are not; tiles of one block and of two.
@pytest.mark.parametrize(
    ("sizes", "tile", "k", "n"),
    [("balanced", 16, 32, 48), ("imbalanced", 32, 40, 24), ("worst for the buffer", 16, 20, 64), ("none", 16, 16, 16)],
)
def test_gpu_kernels_equal_a_loop_over_the_groups(sizes, tile, k, n):
    check(gpu_product, gpu_outer, groups_of(SIZES[sizes], tile, unused_tiles=1), k, n, blocks=SMALL)


@pytest.mark.parametrize("sizes", ["imbalanced", "the last takes nearly all"])
def test_tpu_kernels_equal_a_loop_over_the_groups(sizes):
    check(tpu_product, tpu_outer, groups_of(SIZES[sizes], 128), 130, 24)


def compiled(target: str, dtype, rows: int, k: int, n: int):
    """Memory of the three products, compiled for hardware that is not there; and the rows of the buffer."""
    chosen = parse_target(target)
    on = jax.sharding.SingleDeviceSharding(target_devices(chosen)[0])
    tile = choose_tile(chosen.target, rows=rows, groups=GROUPS)
    rows = aligned_row_count(rows, GROUPS, tile)

    def program(function, left, right, **options):
        def run(left, right, sizes):
            groups = Groups(sizes=sizes, rows=rows, tile=tile)
            return function(left, right, groups, target=chosen.target, **options)

        arrays = [jax.ShapeDtypeStruct(shape, dtype, sharding=on) for shape in (left, right)]
        return jax.jit(run).lower(*arrays, jax.ShapeDtypeStruct((GROUPS,), jnp.int32, sharding=on)).compile()

    programs = [
        program(grouped_product, (rows, k), (GROUPS, k, n)),
        program(grouped_product, (rows, n), (GROUPS, k, n), transposed=True),
        program(grouped_outer, (rows, k), (rows, n)),
    ]
    return programs, rows


# From jax 0.12 on; see kernels/attention/gpu.py.
@pytest.mark.filterwarnings("ignore:The Pallas Triton backend is deprecated:DeprecationWarning")
@pytest.mark.parametrize(
    ("target", "dtype", "k", "call"),
    [
        ("h100x1", "bfloat16", 520, "panax_grouped"),
        ("h100x1", "float32", 512, "panax_grouped"),
        ("v5e-1", "bfloat16", 512, "tpu_custom_call"),
        ("v5p-8", "float32", 512, "tpu_custom_call"),
    ],
)
def test_compiles_to_the_kernels_without_large_temporaries(target, dtype, k, call):
    programs, rows = compiled(target, dtype, 4096, k, 1408)
    for program in programs:
        assert call in program.as_text()
        # The bookkeeping of tiles and groups; the operands are megabytes.
        assert program.memory_analysis().temp_size_in_bytes < 1e6
        if target[0] == "v":
            # It states what all rows take, not what they take times the groups.
            assert program.cost_analysis()["flops"] < 1.1 * 2 * rows * k * 1408
