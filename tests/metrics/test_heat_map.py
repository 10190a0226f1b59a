"""The picture of figures by rows and columns."""

import string
import zlib

import numpy as np
import pytest

from panax.core import HeatMap
from panax.metrics import heat_map
from panax.metrics.heat_map import GLYPHS, encode_png


def drawn(values, numbers):
    return heat_map(HeatMap(values, numbers, "layer", "expert"))


def decoded(data: bytes) -> np.ndarray:
    """The pixels of a picture as `encode_png` writes it."""
    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    chunks, at = {}, 8
    while at < len(data):
        length = int.from_bytes(data[at : at + 4], "big")
        kind, body = data[at + 4 : at + 8], data[at + 8 : at + 8 + length]
        assert zlib.crc32(kind + body) == int.from_bytes(data[at + 8 + length : at + 12 + length], "big")
        chunks[kind], at = body, at + 12 + length
    width, height = (int.from_bytes(chunks[b"IHDR"][i : i + 4], "big") for i in (0, 4))
    assert chunks[b"IHDR"][8:] == bytes([8, 2, 0, 0, 0]) and chunks[b"IEND"] == b""
    lines = np.frombuffer(zlib.decompress(chunks[b"IDAT"]), np.uint8).reshape(height, 1 + 3 * width)
    assert (lines[:, 0] == 0).all()
    return lines[:, 1:].reshape(height, width, 3)


def test_a_picture_comes_back():
    image = np.random.default_rng(0).integers(0, 256, (5, 7, 3)).astype(np.uint8)
    np.testing.assert_array_equal(decoded(encode_png(image)), image)


def count(image, color):
    return (image == np.array(color, np.uint8)).all(axis=-1).sum()


@pytest.mark.parametrize("layers, experts", [(1, 1), (1, 2), (4, 8), (3, 64), (61, 384)])
def test_the_heat_map_has_a_cell_for_each_layer_and_expert(layers, experts):
    numbers = tuple(range(3, 3 + layers))
    white, blue, red = (drawn(np.full((layers, experts), load), numbers) for load in (1.0, 0.0, 2.0))
    assert white.shape == blue.shape == red.shape
    cells = (white != blue).any(axis=-1)
    filled = np.argwhere(cells)
    height, width = filled.max(axis=0) - filled.min(axis=0) + 1
    assert height >= 4 * layers - 1 and width >= 4 * experts - 1
    assert count(blue, (33, 102, 172)) > count(white, (33, 102, 172))
    assert count(red, (178, 24, 43)) > count(white, (178, 24, 43))
    one = np.full((layers, experts), 1.0)
    one[-1, -1] = 2.0
    changed = np.argwhere((drawn(one, numbers) != white).any(axis=-1))
    assert (changed.max(axis=0) == filled.max(axis=0)).all(), "the last layer's last expert is not below and right"
    assert (np.ptp(changed, axis=0) <= 36).all()


def test_every_letter_has_its_dots():
    assert {len(dots) for dots in GLYPHS.values()} == {15}
    assert set(string.ascii_lowercase + string.digits) < set(GLYPHS)
    assert len({*GLYPHS.values()}) == len(GLYPHS) - 1, "letters look alike that are not 0 and o"
    strange = heat_map(HeatMap(np.ones((1, 1)), (0,), "größe", "x"))
    assert strange.shape[2] == 3
