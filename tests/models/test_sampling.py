"""Settings of generation: values out of range are refused, and none but `top_k` makes another program."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from panax.core.errors import DataError, RecipeError
from panax.models import DecoderConfig, DecoderTask
from panax.models.decoder import sampling

TASK = DecoderTask(model=DecoderConfig(vocab_size=96, max_length=32, embed=16, num_layers=1, heads=2, ffn=32))


@pytest.fixture(scope="module")
def params():
    return TASK.init(jax.random.key(0))[0]


def generated(params, prompt=((5, 6, 7),), count=4, **settings):
    given = jnp.array(prompt, jnp.int32).reshape(len(prompt), -1)
    return TASK.generate(params, {}, given, count, jax.random.key(1), **settings)


REFUSED = {
    "a negative temperature": ({"temperature": -1.0}, RecipeError, "temperature=-1.0; expected 0"),
    "no number": ({"temperature": float("nan")}, RecipeError, "temperature=nan; expected 0"),
    "infinity": ({"temperature": float("inf")}, RecipeError, "temperature=inf; expected 0"),
    "a negative top_k": ({"top_k": -3}, RecipeError, "top_k=-3; expected"),
    "no tokens": ({"count": 0}, RecipeError, "0 tokens to generate"),
    "too many": ({"count": 40}, RecipeError, "the model is for at most 32"),
    "no prompt": ({"prompt": ((),)}, DataError, "the prompt has no token"),
    "an unknown token": (
        {"prompt": ((5, 96),)},
        DataError,
        "the prompt holds the token 96; the model has tokens 0 to 95",
    ),
    "a negative token": ({"prompt": ((-1, 5),)}, DataError, "the prompt holds the token -1"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_settings_out_of_range_are_refused(case, params):
    settings, error, words = REFUSED[case]
    with pytest.raises(error, match=words):
        generated(params, **settings)


def test_temperatures_and_counts_share_a_program(params):
    before = sampling._sample._cache_size()
    drawn = [generated(params, count=count, temperature=t) for t in (0.0, 0.5, 0.7) for count in (4, 5)]
    assert sampling._sample._cache_size() == before + 1
    assert [each.shape[1] for each in drawn] == [4, 5] * 3
    # A longer continuation begins as the shorter one does.
    for short, long in zip(drawn[::2], drawn[1::2]):
        np.testing.assert_array_equal(short, long[:, :4])
    np.testing.assert_array_equal(drawn[0], generated(params, temperature=0.0, top_k=1))
