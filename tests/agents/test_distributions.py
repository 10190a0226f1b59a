"""Distributions over actions against stable-baselines3, and against the sums and integrals that define them."""

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from panax.agents import Categorical, DiagonalGaussian, SquashedGaussian, make_distribution
from panax.core.errors import RecipeError
from panax.environments import Box, Discrete

GIVEN = {
    name: np.asarray(numbers, np.float32)
    for name, numbers in json.loads((Path(__file__).parent / "sb3_golden.json").read_text())["densities"].items()
}
SPACE = Box(low=-1.0, high=1.0, shape=(3,))


def numbers_of(count=16):
    deviation = np.broadcast_to(GIVEN["log_deviation"], (count, 3))
    return jnp.concatenate([GIVEN["mean"][:count], deviation], axis=-1)


def test_equal_to_stable_baselines3():
    numbers, drawn = numbers_of(), jnp.asarray(GIVEN["drawn"])
    gaussian, squashed = DiagonalGaussian(space=SPACE), SquashedGaussian(space=SPACE)
    np.testing.assert_allclose(gaussian.log_prob(numbers, drawn), GIVEN["gaussian"], atol=1e-5)
    np.testing.assert_allclose(gaussian.entropy(numbers, drawn), GIVEN["gaussian_entropy"], atol=1e-5)
    # torch takes log(1 - tanh(u) ** 2), which loses digits where tanh is nearly 1.
    np.testing.assert_allclose(squashed.log_prob(numbers, drawn), GIVEN["squashed"], atol=1e-4)
    logits, choice = jnp.asarray(GIVEN["logits"]), jnp.asarray(GIVEN["choice"], jnp.int32)
    categorical = Categorical(count=4)
    np.testing.assert_allclose(categorical.log_prob(logits, choice), GIVEN["categorical"], atol=1e-5)
    np.testing.assert_allclose(categorical.entropy(logits, choice), GIVEN["categorical_entropy"], atol=1e-5)


def test_a_squashed_density_has_the_integral_1():
    family = SquashedGaussian(space=Box(low=-2.0, high=2.0, shape=(1,)))
    raw = jnp.linspace(-8.0, 8.0, 4001)[:, None]
    numbers = jnp.broadcast_to(jnp.array([0.4, -0.3]), (4001, 2))
    density = jnp.exp(family.log_prob(numbers, raw))
    assert np.trapezoid(density, jnp.tanh(raw[:, 0])) == pytest.approx(1.0, abs=1e-3)
    far = family.log_prob(numbers[:1], jnp.array([[40.0]]))
    assert jnp.isfinite(far).all(), "where tanh rounds to 1"


@pytest.mark.parametrize("family", [Categorical(count=3), DiagonalGaussian(space=SPACE), SquashedGaussian(space=SPACE)])
def test_what_is_drawn_has_the_entropy_that_is_reported(family):
    count = 20_000
    keys = jax.random.split(jax.random.key(0), count)
    one = jnp.array([0.3, -0.8, 0.1]) if isinstance(family, Categorical) else numbers_of(1)[0]
    numbers = jnp.broadcast_to(one, (count, *one.shape))
    drawn = family.sample(numbers, keys)
    surprise = -family.log_prob(numbers, drawn)
    assert surprise.mean() == pytest.approx(float(family.entropy(numbers, drawn).mean()), abs=0.03)
    again = family.sample(numbers[:5], keys[:5])
    assert (again == drawn[:5]).all(), "an action is a function of its row's key"


def test_actions_lie_in_their_space():
    space = Box(low=(-1.0, 0.0), high=(1.0, 8.0), shape=(2,))
    drawn = 30 * jax.random.normal(jax.random.key(1), (100, 2))
    for continuous in ("gaussian", "squashed"):
        action = make_distribution(space, continuous).action(drawn)
        assert jax.vmap(space.contains)(action).all() and action[:, 1].max() == pytest.approx(8.0)
    assert make_distribution(space).action(jnp.array([[0.25, 3.0]])).tolist() == [[0.25, 3.0]]


def test_spaces_without_a_distribution_are_refused():
    with pytest.raises(RecipeError, match=r"no distribution over the actions Box.*expected Discrete"):
        make_distribution(Box(low=0.0, high=9.0, shape=(2,), dtype="int32"))
    with pytest.raises(RecipeError, match=r"finite bounds.*use 'gaussian'"):
        make_distribution(Box(low=-float("inf"), high=1.0, shape=(2,)), "squashed")
    assert make_distribution(Discrete(count=5)) == Categorical(count=5)
