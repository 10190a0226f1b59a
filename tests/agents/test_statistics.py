"""Running statistics equal those of all that was seen."""

import jax
import jax.numpy as jnp
import numpy as np

from panax.agents import Statistics


def test_pieces_give_what_the_whole_has():
    seen = 3.0 + 5.0 * np.random.default_rng(0).standard_normal((7, 11, 4), dtype=np.float32)
    seen[3:] *= 20
    found = Statistics.create((4,))
    for piece in seen:
        found = found.update(jnp.asarray(piece))
    np.testing.assert_allclose(found.mean, seen.mean(axis=(0, 1)), rtol=1e-5)
    np.testing.assert_allclose(found.variance, seen.var(axis=(0, 1)), rtol=1e-5)
    assert found.count == 77


def test_before_anything_was_seen_nothing_is_changed():
    values = jnp.array([[0.5, -2.0], [50.0, 0.0]])
    assert Statistics.create((2,)).normalize(values, 10.0).tolist() == [[0.5, -2.0], [10.0, 0.0]]


def test_small_variance_beside_a_large_mean():
    """A sum of squares would have lost it."""
    seen = 1e4 + np.random.default_rng(1).standard_normal((64, 100, 1), dtype=np.float32)
    found = jax.lax.scan(lambda s, piece: (s.update(piece), None), Statistics.create((1,)), jnp.asarray(seen))[0]
    np.testing.assert_allclose(found.variance, seen.astype(np.float64).var(axis=(0, 1)), rtol=1e-2)
    normal = found.normalize(jnp.asarray(seen[0]), 10.0)
    assert abs(float(normal.mean())) < 0.5 and 0.7 < float(normal.std()) < 1.3
