"""Grouped products against a loop over the groups in float64, and the layout that they work on."""

import functools
import itertools
import logging
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from grouped_cases import GROUPS, SIZES, assert_outer, assert_product, groups_of, matrices, sorted_rows
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from panax.core import Target
from panax.kernels.cpu.native import OWN, unavailable_reason
from panax.kernels.grouped.grouped_matmul import (
    GroupedCase,
    Groups,
    aligned_row_count,
    choose_tile,
    grouped_outer,
    grouped_product,
    map_groups,
)
from panax.kernels.registry import _log_once, check_name, choose, log_choice

K, N = 40, 24

needs_library = pytest.param(
    OWN,
    marks=pytest.mark.skipif(
        unavailable_reason(OWN, "float32") is not None, reason=str(unavailable_reason(OWN, "float32"))
    ),
)


@functools.cache
def compiled(implementation: str):
    """One program for all sizes."""
    options = {"target": Target("cpu"), "implementation": implementation}
    product = jax.jit(functools.partial(grouped_product, **options))
    transposed = jax.jit(functools.partial(grouped_product, **options, transposed=True))
    return product, transposed, jax.jit(functools.partial(grouped_outer, **options))


def check(implementation: str, groups: Groups) -> None:
    product, transposed, outer = compiled(implementation)
    x, y = sorted_rows(groups, K, 0), sorted_rows(groups, N, 1)
    w = matrices(groups.sizes.shape[0], K, N)
    assert_product(product(x, w, groups), x, w, groups)
    assert_product(transposed(y, w, groups), y, w.swapaxes(1, 2), groups)
    assert_outer(outer(x, y, groups), x, y, groups)


@pytest.mark.parametrize("tile", [8, 32])
@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
@pytest.mark.parametrize("implementation", ["reference", "blocked", needs_library])
def test_equals_a_loop_over_the_groups(implementation, sizes, tile):
    check(implementation, groups_of(sizes, tile))


@pytest.mark.parametrize("num_groups", [1, 64])
@pytest.mark.parametrize("implementation", ["blocked", needs_library])
def test_one_group_and_many(num_groups, implementation):
    for seed in range(3):
        shares = np.random.default_rng(seed).dirichlet(np.full(num_groups, 0.3))
        check(implementation, groups_of(np.random.default_rng(seed).multinomial(200, shares).tolist(), 8))


def test_chunks_of_all_sizes():
    """Groups around the expected size take one chunk, others several; the buffer's end is never overrun."""
    for seed in range(20):
        random = np.random.default_rng(seed)
        check("blocked", groups_of(random.multinomial(1200, random.dirichlet(np.full(4, 3.0))).tolist(), 8))


def test_sums_are_kept_in_float32():
    groups = groups_of([512, 0], 16)
    x, w = jnp.ones((groups.rows, 1024), jnp.bfloat16), jnp.ones((2, 1024, 16), jnp.bfloat16)
    y = jnp.ones((groups.rows, 16), jnp.bfloat16)
    for implementation in ("reference", "blocked"):
        # bfloat16 stops counting at 256.
        product, _, outer = compiled(implementation)
        assert product(x, w, groups).dtype == jnp.bfloat16
        assert (product(x, w, groups)[:512] == 1024).all()
        assert outer(x, y, groups).dtype == jnp.float32
        assert (outer(x, y, groups)[0] == 512).all()


@pytest.mark.parametrize("k", [40, 128])
def test_bfloat16(k):
    groups = groups_of(SIZES["imbalanced"], 16)
    w = jnp.asarray(matrices(GROUPS, k, N), jnp.bfloat16)
    x, y = (jnp.asarray(sorted_rows(groups, dim, 5), jnp.bfloat16) for dim in (k, N))
    x32, y32, w32 = (np.asarray(a, np.float32) for a in (x, y, w))
    options = {"target": Target("cpu"), "implementation": "blocked", "out_dtype": jnp.float32}
    # Products of 8-bit mantissas are exact in float32.
    assert_product(jax.jit(functools.partial(grouped_product, **options))(x, w, groups), x32, w32, groups)
    product = jax.jit(functools.partial(grouped_product, transposed=True, **options))
    assert_product(product(y, w, groups), y32, w32.swapaxes(1, 2), groups)
    assert_outer(jax.jit(functools.partial(grouped_outer, **options))(x, y, groups), x32, y32, groups)


def test_time_follows_the_used_rows():
    product = compiled("blocked")[0]
    x, w = jnp.ones((32768, 512)), jnp.ones((4, 512, 64))

    def seconds(*sizes: int) -> float:
        groups = Groups(sizes=jnp.array(sizes), rows=32768, tile=32)
        times = []
        for _ in range(5):
            start = time.perf_counter()
            product(x, w, groups).block_until_ready()
            times.append(time.perf_counter() - start)
        return min(times)

    seconds(0, 0, 0, 0)
    assert seconds(0, 32, 0, 0) < seconds(8192, 8192, 8192, 8192) / 2


def test_inside_loops_and_shard_map():
    mesh = jax.make_mesh((2,), ("expert",), (AxisType.Auto,), devices=jax.devices()[:2])
    sizes = jnp.array([SIZES["balanced"], SIZES["imbalanced"]], jnp.int32)
    groups = [groups_of(row.tolist(), 8) for row in sizes]
    x = np.stack([sorted_rows(group, K, 2) for group in groups])
    w = matrices(GROUPS, K, N)

    def once(x, w, sizes):
        return grouped_product(x, w, Groups(sizes=sizes, rows=groups[0].rows, tile=8), target=Target("cpu"))

    def looped(x, w, sizes):
        def step(carry, _):
            return carry + once(x, w, sizes), None

        scanned = jax.lax.scan(step, jnp.zeros((groups[0].rows, N)), length=2)[0]
        return jax.lax.while_loop(lambda c: c[0] < 2, lambda c: (c[0] + 1, c[1] + once(x, w, sizes)), (0, scanned))[1]

    def on_device(x, w, sizes):
        return looped(x[0], w, sizes[0])[None]

    sharded = jax.shard_map(
        on_device, mesh=mesh, in_specs=(P("expert"), P(), P("expert")), out_specs=P("expert"), check_vma=False
    )
    for actual, rows, group in zip(jax.jit(sharded)(x, w, sizes), x, groups):
        assert_product(np.asarray(actual) / 4, rows, w, group)


def test_a_feed_forward_of_every_group():
    """Several products and sums in one pass: forward and backward of x -> tanh(x w) v."""
    groups = groups_of(SIZES["imbalanced"], 8)
    x, d_out = sorted_rows(groups, K, 3), sorted_rows(groups, K, 4)
    w, v = matrices(GROUPS, K, N), matrices(GROUPS, N, K)

    def backward(own, chunk):
        out, gradients = jax.vjp(lambda x, w, v: jnp.tanh(x @ w) @ v, chunk[0], *own)
        d_x, d_w, d_v = gradients(chunk[1])
        return (out, d_x), (d_w, d_v)

    def dense(x, w, v):
        rows = jnp.arange(groups.rows)
        own = jnp.sum(rows[:, None] // groups.tile >= jnp.cumsum(groups.tiles)[None, :], axis=1)
        one_hot = (own[:, None] == jnp.arange(GROUPS)[None, :]).astype(x.dtype)
        hidden = jnp.tanh(jnp.einsum("rk,re,ekn->rn", x, one_hot, w))
        return jnp.einsum("rn,re,enk->rk", hidden, one_hot, v)

    used = int(groups.used_tiles) * groups.tile
    (out, d_x), sums = jax.jit(lambda *a: map_groups(backward, (a[0], a[1]), (a[2], a[3]), groups))(x, d_out, w, v)
    x, d_out = (np.nan_to_num(a) for a in (x, d_out))
    expected, gradients = jax.vjp(dense, x, w, v)
    expected_d_x, *expected_sums = gradients(d_out)
    for actual, truth in zip((out[:used], d_x[:used], *sums), (expected[:used], expected_d_x[:used], *expected_sums)):
        np.testing.assert_allclose(actual, truth, rtol=0, atol=2e-6 * float(jnp.abs(truth).max()))


def test_layout_of_tiles():
    for tile, sizes in itertools.product((1, 4, 16), ([0], [5], [3, 0, 9], [0, 4, 0, 1], [16, 17, 0, 0])):
        groups = Groups(sizes=jnp.array(sizes), rows=64 * tile, tile=tile)
        expected, start = [], 0
        for group, size in enumerate(sizes):
            assert groups.starts[group] == start
            expected += [group] * -(-size // tile)
            start = len(expected) * tile
        assert groups.used_tiles == len(expected)
        assert groups.tile_group.tolist() == expected + [len(sizes)] * (64 - len(expected))


def test_the_smallest_buffer_that_holds_any_distribution():
    for rows, num_groups, tile in itertools.product(range(8), (1, 2, 3), (1, 2, 4)):
        taken = [
            sum(-(-size // tile) * tile for size in sizes)
            for sizes in itertools.product(range(rows + 1), repeat=num_groups)
            if sum(sizes) == rows
        ]
        assert aligned_row_count(rows, num_groups, tile) == max(taken)


@pytest.mark.parametrize("platform", ["cpu", "gpu", "tpu"])
def test_tiles_are_such_as_the_kernels_take(platform):
    tiles = [choose_tile(Target(platform), rows=8192, groups=groups) for groups in (1, 8, 64, 512)]
    assert tiles == sorted(tiles, reverse=True)
    for tile in tiles:
        assert (
            choose("grouped matmul", GroupedCase(tile=tile, dtype="bfloat16"), Target(platform)).name
            == {"cpu": "blocked", "gpu": "triton", "tpu": "megablox"}[platform]
        )


def test_what_does_not_fit_is_refused():
    groups = groups_of(SIZES["balanced"], 8)
    x, w = jnp.zeros((groups.rows, K)), jnp.zeros((GROUPS, K, N))
    with pytest.raises(ValueError, match=r"rows=7 must be a multiple of tile=4"):
        Groups(sizes=groups.sizes, rows=7, tile=4)
    with pytest.raises(ValueError, match=r"x has 8 rows, and groups.rows=256"):
        grouped_product(x[:8], w, groups, target=Target("cpu"))
    with pytest.raises(ValueError, match=r"w needs 8 groups and k=40, its dimension 2 with transposed=True"):
        grouped_product(x, w, groups, target=Target("cpu"), transposed=True)
    with pytest.raises(ValueError, match=r"one dtype, not float32 and bfloat16"):
        grouped_product(x, w.astype(jnp.bfloat16), groups, target=Target("cpu"))
    with pytest.raises(ValueError, match=r"groups.rows=256 rows, not 8 and 8"):
        grouped_outer(x[:8], x[:8], groups, target=Target("cpu"))
    with pytest.raises(
        ValueError, match=r"'triton' can't do this grouped matmul: it is for GPUs, and the target is cpu"
    ):
        grouped_product(x, w, groups, target=Target("cpu"), implementation="triton")
    with pytest.raises(ValueError, match="did you mean 'blocked'"):
        check_name("grouped matmul", "bloked")


@pytest.mark.parametrize(
    ("platform", "tile", "dtype", "name", "reason"),
    [
        ("cpu", 8, "float64", "blocked", "fastest"),
        ("cuda", 64, "bfloat16", "triton", "the fastest on gpu"),
        ("gpu", 8, "bfloat16", "blocked", "tile=8 must be a multiple of 16"),
        ("gpu", 64, "float64", "blocked", "float32, not float64"),
        ("tpu", 128, "float32", "megablox", "the fastest on tpu"),
        ("tpu", 64, "float32", "blocked", "tile=64 must be a multiple of 128"),
        ("tpu", 128, "float16", "blocked", "bfloat16 or float32"),
    ],
)
def test_choice_is_a_function_of_the_case(platform, tile, dtype, name, reason):
    choice = choose("grouped matmul", GroupedCase(tile=tile, dtype=dtype), Target(platform))
    assert choice.name == name and reason in choice.reason


def test_reports_once_that_it_is_slow(caplog):
    _log_once.cache_clear()
    with caplog.at_level(logging.INFO, logger="panax.kernels"):
        for platform, tile in (("gpu", 8), ("gpu", 8), ("gpu", 64), ("cpu", 8)):
            case = GroupedCase(tile=tile, dtype="bfloat16")
            log_choice(choose("grouped matmul", case, Target(platform)), Target(platform))
    assert [record.levelname for record in caplog.records] == ["WARNING", "INFO", "INFO"]
    assert "on gpu runs 'blocked': triton can't run here: tile=8" in caplog.messages[0]


@pytest.mark.parametrize("implementation", [needs_library])
def test_groups_beyond_the_rows_are_refused(implementation):
    """A custom call must not read or write memory that isn't its own, whatever the sizes are."""
    product, _, outer = compiled(implementation)
    w = matrices(2, K, N)
    for sizes in ([9, 8], [-1, 4], [2**31 - 1, 1]):
        groups = Groups(sizes=jnp.array(sizes, jnp.int32), rows=16, tile=8)
        x, y = jnp.ones((16, K)), jnp.ones((16, N))
        with pytest.raises(jax.errors.JaxRuntimeError, match="not inside of its rows"):
            jax.block_until_ready(product(x, w, groups))
        with pytest.raises(jax.errors.JaxRuntimeError, match="not inside of its rows"):
            jax.block_until_ready(outer(x, y, groups))


@pytest.mark.parametrize("implementation", [needs_library])
def test_a_row_has_the_same_bits_beside_any_others(implementation):
    product = compiled(implementation)[0]
    x, w = jax.random.normal(jax.random.key(0), (64, K)), matrices(3, K, N)
    alone = product(x, w, Groups(sizes=jnp.array([0, 1, 0]), rows=64, tile=8))[0]
    for sizes in ([0, 64, 0], [0, 7, 40], [0, 3, 0]):
        assert jnp.array_equal(product(x, w, Groups(sizes=jnp.array(sizes), rows=64, tile=8))[0], alone)
