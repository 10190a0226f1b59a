"""A film's file is read by Pillow as what was drawn; a sheet holds the frames in their order."""

import io

import numpy as np
from PIL import Image, ImageSequence

from panax.metrics.film import GAP, contact_sheet, encode_animated_png


def frames(count: int = 5) -> np.ndarray:
    """A dot that moves over a picture that stays; the last two are alike."""
    still = np.random.default_rng(0).integers(0, 255, (20, 30, 3)).astype(np.uint8)
    film = np.stack([still] * count)
    for at in range(count):
        film[at, 4 + min(at, count - 2), 7:9] = (255, 0, at)
    film[-1] = film[-2]
    return film


def test_an_animated_png_is_read_as_it_was_drawn():
    film = frames()
    image = Image.open(io.BytesIO(encode_animated_png(film, 0.04)))
    assert image.format == "PNG" and image.n_frames == 5  # pyright: ignore
    for drawn, read in zip(film, ImageSequence.Iterator(image)):
        np.testing.assert_array_equal(np.asarray(read.convert("RGB")), drawn)
        assert read.info["duration"] == 40
    assert len(encode_animated_png(film, 0.04)) < 1.3 * len(encode_animated_png(film[:1], 0.04)), (
        "a frame holds what changed"
    )


def test_a_sheet_has_the_first_and_the_last_frame():
    film = np.stack([np.full((4, 6, 3), at, np.uint8) for at in range(50)])
    picture = contact_sheet(film, columns=4, max_frames=8)
    assert picture.shape == (2 * 4 + GAP, 4 * 6 + 3 * GAP, 3)
    assert picture[0, 0, 0] == 0 and picture[-1, -1, 0] == 49 and picture[4, 0, 0] == 255
    assert contact_sheet(film[:1]).shape == (4, 6, 3)
