"""Short convolutions are a loop over positions, within documents, and continue from their cache."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from drawing import drawn

from panax.core import RecipeError
from panax.layers import ShortConvolution
from panax.models import ConvolutionConfig

EMBED, CHANNELS, TAPS, ROWS, LENGTH = 6, 8, 4, 2, 9


@pytest.fixture(scope="module")
def layer() -> ShortConvolution:
    return drawn(lambda key: ShortConvolution.build(key, EMBED, channels=CHANNELS, taps=TAPS))


@pytest.fixture(scope="module")
def rows() -> np.ndarray:
    return np.random.default_rng(0).normal(size=(ROWS, LENGTH, EMBED)).astype(np.float32)


def expected(layer: ShortConvolution, rows: np.ndarray, segment: np.ndarray) -> np.ndarray:
    """In float64, position by position."""
    w_b, w_c, w_x, conv, w_o = (
        np.asarray(w, np.float64) for w in (layer.w_b, layer.w_c, layer.w_x, layer.conv, layer.w_o)
    )
    out = np.zeros((ROWS, LENGTH, EMBED))
    for row in range(ROWS):
        inputs = (rows[row] @ w_b) * (rows[row] @ w_x)
        for place in range(LENGTH):
            mixed = np.zeros(CHANNELS)
            for back in range(min(TAPS, place + 1)):
                if segment[row, place] and (segment[row, place - back : place + 1] == segment[row, place]).all():
                    mixed += conv[:, TAPS - 1 - back] * inputs[place - back]
            out[row, place] = (rows[row, place] @ w_c * mixed) @ w_o
    return out


def test_it_is_a_loop_over_positions_of_a_document(layer: ShortConvolution, rows: np.ndarray) -> None:
    segment = np.array([[1] * LENGTH, [1, 1, 2, 2, 2, 2, 3, 0, 0]], np.int32)
    position = jnp.zeros(segment.shape, jnp.int32)
    found = jax.jit(lambda x, s: layer(x, position, s))(rows, segment)
    np.testing.assert_allclose(found, expected(layer, rows, segment), atol=2e-6)


def test_it_continues_from_its_cache_whatever_the_rows_have_left(layer: ShortConvolution, rows: np.ndarray) -> None:
    whole = expected(layer, rows, np.ones((ROWS, LENGTH), np.int32))
    position = jnp.zeros((ROWS, 3), jnp.int32)
    extend = jax.jit(lambda x, cache, valid: layer.extend(x, position, cache, position[:, 0], valid))
    cache, done = layer.empty_cache(ROWS, LENGTH, jnp.float32), np.zeros(ROWS, int)
    for counts in ((3, 1), (0, 3), (3, 2), (3, 3)):
        valid = np.arange(3)[None] < np.array(counts)[:, None]
        index = np.minimum(done[:, None] + np.arange(3), LENGTH - 1)
        x = np.where(valid[..., None], np.take_along_axis(rows, index[..., None], axis=1), 7.0)
        found, cache = extend(x, cache, valid)
        expected_part = np.take_along_axis(whole, index[..., None], axis=1)
        np.testing.assert_allclose(np.asarray(found)[valid], expected_part[valid], atol=2e-6)
        done += counts
    assert done.tolist() == [LENGTH, LENGTH]


def test_settings_without_meaning_are_refused() -> None:
    config = ConvolutionConfig(num_layers=2, attention_layers=(0, 1))
    assert [kind.mixer for kind in dataclasses.replace(config, attention_layers=(1,)).kinds] == [
        "short_convolution",
        "attention",
    ]
    with pytest.raises(RecipeError, match=r"model.conv_taps=0; expected a positive number"):
        ConvolutionConfig(conv_taps=0)
    with pytest.raises(RecipeError, match=r"model.heads=2 has no effect without attention"):
        ConvolutionConfig(heads=2)
