"""The figures of expert load, the warning of one that starves, and the picture of all of them."""

import zlib

import numpy as np
import pytest

from panax.metrics import ExpertWatch, heat_map
from panax.metrics.experts import load_figures, relative_loads
from panax.metrics.heat_map import LETTERS, png


def step(load, **others):
    return {"experts/load": np.asarray(load, np.float32), **{f"experts/{k}": np.asarray(v) for k, v in others.items()}}


def test_figures_of_an_even_and_of_a_collapsed_layer():
    figures = load_figures(
        relative_loads(np.array([[5.0, 5.0, 5.0, 5.0], [20.0, 0.0, 0.0, 0.0], [1.0, 1.0, 3.0, 3.0]]))
    )
    np.testing.assert_allclose(figures["load_min"], [1.0, 0.0, 0.5])
    np.testing.assert_allclose(figures["load_max"], [1.0, 4.0, 1.5])
    np.testing.assert_allclose(figures["max_violation"], [0.0, 3.0, 0.5])
    thirds = -(2 * 0.125 * np.log(0.125) + 2 * 0.375 * np.log(0.375)) / np.log(4)
    np.testing.assert_allclose(figures["load_entropy"], [1.0, 0.0, thirds], atol=1e-12)


def test_a_record_is_of_all_steps_since_the_last():
    watch = ExpertWatch((1, 3))
    watch.add(step([[4, 0], [1, 3]], entropy=[0.2, 0.4], dropped=[0.0, 0.5]))
    watch.add(step([[0, 4], [1, 3]], entropy=[0.4, 0.8], dropped=[0.0, 0.1]))
    scalars, loads, warnings = watch.take()
    np.testing.assert_allclose(loads, [[1.0, 1.0], [0.5, 1.5]])
    assert warnings == []
    expected = {
        "experts/layer_1/load_max": 1.0, "experts/layer_3/load_max": 1.5, "experts/load_max": 1.5,
        "experts/layer_1/load_min": 1.0, "experts/layer_3/load_min": 0.5, "experts/load_min": 0.5,
        "experts/max_violation": 0.5, "experts/layer_1/entropy": 0.3, "experts/entropy": 0.45,
        "experts/layer_3/dropped": 0.3, "experts/dropped": 0.15,
    }  # fmt: skip
    assert {name: scalars[name] for name in expected} == pytest.approx(expected)
    assert watch.take() == ({}, None, [])


def test_a_dense_model_has_no_figures():
    watch = ExpertWatch(())
    watch.add({"other": np.zeros((2, 2))})
    assert watch.take() == ({}, None, [])


def warnings_of(watch, *loads):
    watch.add(step(loads))
    return watch.take()[2]


EVEN, STARVING = (10.0, 10.0, 10.0), (15.0, 0.0, 15.0)


def test_a_starving_expert_is_warned_of_once_by_layer_and_number():
    watch = ExpertWatch((1, 3))
    found = [warnings_of(watch, EVEN, STARVING) for _ in range(6)]
    assert [len(lines) for lines in found] == [0, 0, 1, 0, 0, 0]
    assert found[2][0].startswith(
        "layer 3: of 3 experts, 1 got less than 1% of the mean load in 3 reports of 1 steps each"
    )


def test_experts_that_starve_for_a_moment_are_not_warned_of():
    watch = ExpertWatch((0,))
    for load in (STARVING, STARVING, EVEN, STARVING, STARVING, EVEN):
        assert warnings_of(watch, load) == []


def test_an_expert_that_recovered_is_warned_of_again():
    watch = ExpertWatch((0,))
    crumbs = (15.0, 0.2, 15.0)
    loads = [STARVING] * 3 + [crumbs] + [STARVING] * 3 + [EVEN] + [STARVING] * 3
    found = [index for index, load in enumerate(loads) if warnings_of(watch, load)]
    assert found == [2, 10], "crumbs are no recovery, an even load is"


def test_many_starving_experts_are_counted():
    watch = ExpertWatch((0,))
    (found,) = [line for _ in range(3) for line in warnings_of(watch, [1.0] + [0.0] * 15)]
    assert "1, 2, 3, 4, 5, 6, 7, 8 and 7 more got" in found


def decoded(data: bytes) -> np.ndarray:
    """The pixels of a picture as `png` writes it."""
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
    np.testing.assert_array_equal(decoded(png(image)), image)


def count(image, colour):
    return (image == np.array(colour, np.uint8)).all(axis=-1).sum()


@pytest.mark.parametrize("layers, experts", [(1, 1), (1, 2), (4, 8), (3, 64), (61, 384)])
def test_the_heat_map_has_a_cell_for_each_layer_and_expert(layers, experts):
    numbers = tuple(range(3, 3 + layers))
    white, blue, red = (heat_map(np.full((layers, experts), load), numbers) for load in (1.0, 0.0, 2.0))
    assert white.shape == blue.shape == red.shape
    cells = (white != blue).any(axis=-1)
    most = np.argwhere(cells)
    height, width = most.max(axis=0) - most.min(axis=0) + 1
    assert height >= 4 * layers - 1 and width >= 4 * experts - 1
    assert count(blue, (33, 102, 172)) > count(white, (33, 102, 172))
    assert count(red, (178, 24, 43)) > count(white, (178, 24, 43))
    one = np.full((layers, experts), 1.0)
    one[-1, -1] = 2.0
    changed = np.argwhere((heat_map(one, numbers) != white).any(axis=-1))
    assert (changed.max(axis=0) == most.max(axis=0)).all(), "the last layer's last expert is not below and right"
    assert (np.ptp(changed, axis=0) <= 36).all()


def test_letters_are_of_one_size():
    assert {len(dots) for dots in LETTERS.values()} == {15}
