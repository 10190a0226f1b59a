"""Rounding by chance: to one of two neighbors, right by the mean, with bits that are random."""

import jax.numpy as jnp
import numpy as np
import pytest

from panax.core.params.counter_rng import element_bits
from panax.kernels.quantized import round_stochastically


def bits(name, count, rows, columns):
    return element_bits(name, jnp.int32(count), [jnp.arange(rows)[:, None], jnp.arange(columns)[None]])


def test_it_gives_one_of_the_two_neighbours_and_the_mean_is_right():
    values = np.random.default_rng(0).standard_normal(64).astype(np.float32)
    x = jnp.broadcast_to(jnp.asarray(values), (4096, 64))
    rounded = np.asarray(round_stochastically(x, bits("x", 3, 4096, 64)).astype(jnp.float32), np.float64)
    step = np.abs(values) * 2.0**-7
    assert (np.abs(rounded - values) < step).all()
    assert all(len(np.unique(column)) == 2 for column in rounded.T)
    # Five deviations of the mean of 4,096 draws, of at most half a step each.
    assert (np.abs(rounded.mean(0) - values) < 5 * 0.5 * step / 64).all()


@pytest.mark.parametrize("value", [0.0, -0.0, 1.0, -3.5, np.inf, -np.inf, 2.0**-130])
def test_what_bfloat16_holds_stays(value):
    x = jnp.full((8, 8), value, jnp.float32)
    rounded = round_stochastically(x, bits("x", 0, 8, 8))
    assert (np.asarray(rounded, np.float32) == value).all()
    assert np.isnan(np.asarray(round_stochastically(x * jnp.nan, bits("x", 0, 8, 8)), np.float32)).all()


def test_bits_are_random_over_places_counts_and_names():
    drawn = [np.asarray(bits(name, count, 256, 256)) for name, count in (("a", 0), ("a", 1), ("b", 0))]
    for word in drawn:
        ones = np.unpackbits(word.view(np.uint8))
        assert abs(ones.mean() - 0.5) < 5 * 0.5 / ones.size**0.5
        assert len(np.unique(word)) > 65536 - 10
        # Neighbors along both dimensions have half of their bits in common.
        for other in (word[1:, :] ^ word[:-1, :], word[:, 1:] ^ word[:, :-1]):
            assert abs(np.unpackbits(np.ascontiguousarray(other).view(np.uint8)).mean() - 0.5) < 0.002
    for one, other in ((0, 1), (0, 2)):
        assert (drawn[one] == drawn[other]).mean() < 1e-3
        assert abs(np.unpackbits((drawn[one] ^ drawn[other]).view(np.uint8)).mean() - 0.5) < 0.002
