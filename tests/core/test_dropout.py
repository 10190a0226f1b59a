"""Dropout's mask: the right rate, independent of layout, different wherever it should differ."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from panax.core import dropout

SHAPE = (16, 32, 64)


def mask(key=0, rows=None, rate=0.25):
    rows = jnp.arange(SHAPE[0]) if rows is None else rows
    return np.asarray(dropout(jnp.ones((rows.shape[0], *SHAPE[1:])), rate, jax.random.key(key), rows)) == 0


def test_rate_and_scale():
    x = dropout(jnp.ones(SHAPE), 0.25, jax.random.key(0), jnp.arange(16))
    dropped = np.asarray(x) == 0
    # 32,768 coin tosses: five standard deviations.
    assert abs(dropped.mean() - 0.25) < 5 * np.sqrt(0.25 * 0.75 / dropped.size)
    np.testing.assert_allclose(np.asarray(x)[~dropped], 1 / 0.75, rtol=1e-6)


@pytest.mark.parametrize("axis", [0, 1, 2])
def test_neighbours_are_independent(axis):
    m = mask(rate=0.5).astype(np.float64) - 0.5
    neighbors = (np.roll(m, 1, axis) * m).mean() * 4
    assert abs(neighbors) < 5 / np.sqrt(m.size)


def test_differs_by_key():
    assert abs((mask(0, rate=0.5) == mask(1, rate=0.5)).mean() - 0.5) < 5 * 0.5 / np.sqrt(np.prod(SHAPE))


def test_a_row_and_a_position_keep_their_mask_in_any_part():
    whole = mask()
    np.testing.assert_array_equal(mask(rows=jnp.arange(1, 16, 4)), whole[1::4])
    place = jnp.array([5, 2, 7])
    part = dropout(jnp.ones((SHAPE[0], 3, SHAPE[2])), 0.25, jax.random.key(0), jnp.arange(16), place)
    np.testing.assert_array_equal(np.asarray(part) == 0, whole[:, np.asarray(place)])
