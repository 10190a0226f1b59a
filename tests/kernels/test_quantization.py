"""Codes and scales: each number is rounded to the nearest of its format, block by block; values without a scale are reported."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import torch
from torchao.optim import quant_utils

from panax.core.params.counter_rng import element_bits
from panax.kernels.quantized import (
    DYNAMIC,
    DYNAMIC_UNSIGNED,
    FLOAT8,
    INT4,
    INT8,
    DynamicMap,
    Linear,
    QuantizedArray,
    pack,
    quantize,
    unpack,
)  # fmt: skip

FORMATS = {"int8": INT8, "int4": INT4, "float8": FLOAT8, "dynamic": DYNAMIC, "unsigned": DYNAMIC_UNSIGNED}
MAPS = {"dynamic": DYNAMIC, "unsigned": DYNAMIC_UNSIGNED}

QUANTIZE = jax.jit(quantize, static_argnums=(1, 2))
BACK = jax.jit(lambda found: found.dequantize())


def values_of(format):
    """All that a format holds, ascending, in units of its largest."""
    if isinstance(format, DynamicMap):
        return format.values.astype(np.float64)
    if isinstance(format, Linear):
        return np.arange(-format.largest, format.largest + 1) / format.largest
    every = np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float64) / 448
    return np.unique(every[np.isfinite(every)])


def numbers(format, shape, seed=0):
    found = np.random.default_rng(seed).standard_normal(shape).astype(np.float32)
    return np.abs(found) if format is DYNAMIC_UNSIGNED else found


@pytest.mark.parametrize("name", FORMATS)
def test_numbers_become_the_nearest_of_their_block(name):
    format = FORMATS[name]
    x = numbers(format, (6, 4, 64)) * np.float32(10.0) ** np.arange(-3, 3)[:, None, None].astype(np.float32)
    quantized = QUANTIZE(jnp.asarray(x), format, (2, 16))
    assert quantized.shape == x.shape and quantized.scales.shape == (6, 2, 4) and quantized.codes.dtype == format.dtype
    assert quantized.nbytes == x.size // format.packed + 6 * 2 * 4 * 4
    blocks = x.astype(np.float64).reshape(6, 2, 2, 4, 16).swapaxes(2, 3).reshape(6, 2, 4, 32)
    back = np.asarray(BACK(quantized), np.float64).reshape(6, 2, 2, 4, 16).swapaxes(2, 3).reshape(6, 2, 4, 32)
    values = values_of(format)
    # A block's largest number, on either side, is what the outermost value on that side stands for.
    largest = np.maximum(
        blocks.max(-1, keepdims=True) / values.max(), blocks.min(-1, keepdims=True) / min(values.min(), -1e-9)
    )
    if format is DYNAMIC_UNSIGNED:
        largest = np.abs(blocks).max(-1, keepdims=True)
    nearest = np.abs((blocks / largest)[..., None] - values).min(-1)
    # Scaling to a block's largest and back rounds three times in float32.
    assert (np.abs(back - blocks) / largest <= nearest + 4e-7).all()


@pytest.mark.parametrize("name", FORMATS)
def test_rounding_by_chance_gives_a_neighbour_and_the_mean_is_right(name):
    format = FORMATS[name]
    x = np.append(numbers(format, 31), np.float32(4.0)).astype(np.float32)
    if format is not DYNAMIC_UNSIGNED:
        x[0] = -4.0
    many = jnp.broadcast_to(jnp.asarray(x), (4096, 32))
    bits = element_bits("x", jnp.int32(1), [jnp.arange(4096)[:, None], jnp.arange(32)[None]])
    back = np.asarray(BACK(QUANTIZE(many, format, 32, bits)), np.float64)
    # The signed map ends before -1, and is scaled so that it holds the least number.
    values = values_of(format) * (4.0 if format is DYNAMIC_UNSIGNED else 4.0 / min(1.0, -values_of(format).min()))
    above = np.clip(np.searchsorted(values, x, side="right"), 1, len(values) - 1)
    step = values[above] - values[above - 1]
    assert (np.abs(back - x) <= step + 1e-5).all()
    # Five deviations of the mean of 4,096 draws, of at most half a step each.
    assert (np.abs(back.mean(0) - x) <= 5 * 0.5 * step / 64 + 1e-6).all()


@pytest.mark.parametrize("name", FORMATS)
def test_zeros_stay_and_what_is_not_finite_is_reported(name):
    format = FORMATS[name]
    x = np.zeros((5, 8), np.float32)
    x[1], x[2, 3], x[3, 0], x[4] = 1e-39, np.nan, np.inf, 1.0
    for bits in (None, jnp.full((5, 8), 2**32 - 1, jnp.uint32)):
        found = QUANTIZE(jnp.asarray(x), format, 8, bits)
        back = np.asarray(BACK(found))
        assert (back[:2] == 0).all() and (np.asarray(found.scales)[:2] == 0).all()
        assert np.isnan(back[2:4]).all() and (back[4] == 1).all()


def test_blocks_that_do_not_divide_are_cut_off():
    x = jnp.asarray(numbers(INT8, (3, 10)))
    found = QUANTIZE(x, INT8, (2, 4))
    assert found.scales.shape == (2, 3) and found.shape == (3, 10)
    for rows in (slice(0, 2), slice(2, 3)):
        for columns in (slice(0, 4), slice(8, 10)):
            alone = QUANTIZE(x[rows, columns], INT8, tuple(x[rows, columns].shape))
            np.testing.assert_array_equal(BACK(found)[rows, columns], BACK(alone))


def test_it_is_a_tree_that_is_mapped_scanned_and_of_its_own_type():
    x = jnp.asarray(numbers(INT4, (3, 2, 8)), jnp.bfloat16)
    whole = QUANTIZE(x, INT4, 4)
    mapped = jax.jit(jax.vmap(lambda x: quantize(x, INT4, 4)))(x)
    assert jax.tree.structure(whole) == jax.tree.structure(mapped)
    assert all((a == b).all() for a, b in zip(jax.tree.leaves(whole), jax.tree.leaves(mapped)))
    scanned = jax.lax.scan(lambda _, part: (None, part.dequantize()), None, whole)[1]
    assert scanned.dtype == jnp.bfloat16 and (scanned == BACK(whole)).all()
    assert whole.dequantize(jnp.float32).dtype == jnp.float32


@pytest.mark.parametrize("name", FORMATS)
def test_zeros_are_made_as_they_are_rounded(name):
    made, rounded = (
        QuantizedArray.zeros((3, 10), FORMATS[name], (2, 4), "bfloat16"),
        QUANTIZE(jnp.zeros((3, 10), jnp.bfloat16), FORMATS[name], (2, 4)),
    )
    assert jax.tree.structure(made) == jax.tree.structure(rounded)
    assert all(a.dtype == b.dtype and (a == b).all() for a, b in zip(jax.tree.leaves(made), jax.tree.leaves(rounded)))


@pytest.mark.parametrize("name", MAPS)
def test_the_dynamic_map_is_that_of_torchao(name):
    format = MAPS[name]
    values = np.array(quant_utils.create_dynamic_map(format.signed), np.float32)
    np.testing.assert_array_equal(format.values, values)
    drawn = np.random.default_rng(0)
    small = 10 ** drawn.uniform(-9, 0, 20_000) * (drawn.choice([-1, 1], 20_000) if format.signed else 1)
    between = (values[1:] + values[:-1]) / 2
    x = np.concatenate(
        [drawn.uniform(-1 if format.signed else 0, 1, 20_000), small, values, between, np.nextafter(between, 2)]
    )
    wanted = quant_utils.quantize_8bit_with_qmap(torch.tensor(x.astype(np.float32)), torch.tensor(values))
    np.testing.assert_array_equal(jax.jit(format.encode)(jnp.asarray(x, jnp.float32)), wanted.numpy())


def test_the_dynamic_map_has_the_published_values():
    # By hand, from arXiv:1511.04561 with 7 bits of exponent at most: the middles of equal shares of each decade.
    assert DYNAMIC.values[[0, 127, 128, 255]].tolist() == pytest.approx([-0.99296875, 0.0, 5.5e-7, 1.0], rel=1e-6)
    assert DYNAMIC_UNSIGNED.values[[0, 1, 2, 254, 255]].tolist() == pytest.approx(
        [0.0, 3.25e-7, 7.75e-7, 1 - 0.45 / 128, 1.0], rel=1e-6
    )
    assert all(len(np.unique(format.values)) == 256 for format in MAPS.values())


def test_codes_are_packed_and_unpacked():
    codes = jnp.arange(-8, 8, dtype=jnp.int8).reshape(2, 8)
    assert pack(codes).shape == (2, 4) and (unpack(pack(codes)) == codes).all()


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: pack(jnp.zeros((2, 3), jnp.int8)), r"the shape is \(2, 3\); make its size even"),
        (lambda: quantize(jnp.zeros(4), INT8, (2, 2)), r"block=\(2, 2\) for an array of the shape \(4,\)"),
        (lambda: quantize(jnp.zeros(4), INT8, 0), r"give 1 or more"),
        (lambda: Linear(3), r"Linear\(bits=3\); expected 4 or 8"),
    ],
)
def test_what_has_no_blocks_is_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()
