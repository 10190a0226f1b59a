"""Rotary embedding of a part of each head's width."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest

from panax.core import RecipeError
from panax.layers import LongScaling, Rotary
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


LONG = LongScaling(short=(1.0, 2.0), long=(3.0, 4.0), original_length=16, extended_length=64)


def test_each_pair_has_a_factor_of_its_own():
    plain = Rotary().frequencies(4)
    np.testing.assert_array_equal(Rotary(scaling=LONG).frequencies(4), plain / np.float32([1, 2]))
    longer = dataclasses.replace(LONG, use="long")
    np.testing.assert_array_equal(Rotary(scaling=longer).frequencies(4), plain / np.float32([3, 4]))
    # The square root of 1 + ln 4 / ln 16.
    assert LONG.amplitude == pytest.approx(1.5**0.5)
    assert dataclasses.replace(LONG, attention_factor=1.2).amplitude == 1.2


def test_factors_of_short_rows_are_for_short_rows():
    sizes = {"embed": 16, "heads": 4}
    assert DecoderConfig(**sizes, max_length=16, rotary=Rotary(scaling=LONG)).max_length == 16
    with pytest.raises(
        RecipeError, match=r"max_length=17, and rotary.scaling is for rows of at most 16; shorten it, or"
    ):
        DecoderConfig(**sizes, max_length=17, rotary=Rotary(scaling=LONG))
    DecoderConfig(**sizes, max_length=64, rotary=Rotary(scaling=dataclasses.replace(LONG, use="long")))
    with pytest.raises(RecipeError, match=r"scaling.short has 2 factors; expected 4, one for each pair of 8 features"):
        DecoderConfig(embed=32, heads=4, max_length=16, rotary=Rotary(scaling=LONG))
    with pytest.raises(RecipeError, match=r"scaling.long=\(0.0, 1.0\); expected positive factors"):
        dataclasses.replace(LONG, long=(0.0, 1.0))
    with pytest.raises(RecipeError, match=r"scaling.factor=0.25; expected 1 or more"):
        dataclasses.replace(LONG, extended_length=4)
