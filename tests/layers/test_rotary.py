"""Rotary embedding of a part of each head's width."""

import jax.numpy as jnp
import numpy as np
import pytest

from panax.core import RecipeError
from panax.layers import Rotary
from panax.models import DecoderConfig


def test_the_first_features_turn_like_a_narrower_head_and_the_rest_stay():
    x = jnp.asarray(np.random.default_rng(0).normal(size=(2, 5, 3, 12)), jnp.float32)
    position = jnp.broadcast_to(jnp.arange(5)[None], (2, 5))
    found = Rotary(fraction=0.5)(x, position)
    np.testing.assert_array_equal(found[..., :6], Rotary()(x[..., :6], position))
    np.testing.assert_array_equal(found[..., 6:], x[..., 6:])


def test_a_part_that_is_not_of_pairs_is_refused():
    with pytest.raises(RecipeError, match=r"head_dim=4, of which fraction=0.25 is 1; expected an even number"):
        DecoderConfig(embed=16, heads=4, rotary=Rotary(fraction=0.25))
    with pytest.raises(RecipeError, match=r"rotary.fraction=1.5; expected a part of a head's width"):
        Rotary(fraction=1.5)
