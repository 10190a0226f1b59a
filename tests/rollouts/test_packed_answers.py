"""Packed rows hold the same answers as rows of one answer each, in one of few shapes."""

import numpy as np
import pytest

from panax.rollouts.answers import SampledAnswer
from panax.rollouts.packing import MAX_SHAPES, AnswerPlaces, PackedShapes, pack_answers
from panax.rollouts.rows import make_rows


def draw_answers(sizes, seed=0, experts=False):
    draws = np.random.default_rng(seed)
    answers = []
    for group, size in enumerate(sizes):
        first = int(draws.integers(1, size + 1))
        tokens = tuple(draws.integers(1, 50, size + 1).tolist())
        recorded = draws.integers(0, 4, (size, 2, 2)).astype(np.int32) if experts else None
        values = tuple((-draws.random(size + 1 - first)).tolist())
        answers.append(SampledAnswer(tokens[:first], group, tokens[first:], values, "", False, recorded))
    return answers


def segments(batch):
    """Return each answer's leaves by its first advantage, which names it."""
    found = {}
    for row in range(len(batch["tokens"])):
        for number in range(1, batch["segment"][row].max(initial=0) + 1):
            places = np.flatnonzero(batch["segment"][row] == number)
            assert places.size and (np.diff(places) == 1).all()
            leaves = {name: leaf[row, places] for name, leaf in batch.items() if name != "segment"}
            found[leaves["advantage"].max()] = leaves
    return found


@pytest.mark.parametrize("experts", [False, True])
def test_packed_answers_are_those_of_the_rows(experts):
    sizes = np.random.default_rng(1).integers(1, 25, 64)
    rows = make_rows(
        draw_answers(sizes, experts=experts), np.arange(1, 65, dtype=np.float32), np.ones(64, bool), length=24
    )
    shapes = PackedShapes.choose(64, 24, max_length=1000, multiple=4)
    assert shapes.length == 96 and max(shapes.counts) == 16
    packed = pack_answers(rows, shapes)
    count = len(packed["tokens"])
    assert count in shapes.counts and (count - 4) * shapes.length < 1.1 * sizes.sum()
    one, other = segments(rows), segments(packed)
    assert one.keys() == other.keys() and len(one) == 64
    for name, leaves in one.items():
        assert all(np.array_equal(leaf, other[name][key]) for key, leaf in leaves.items())
    empty = packed["segment"] == 0
    assert not packed["tokens"][empty].any() and not packed["loss_mask"][empty].any()
    if experts:
        assert (packed["experts"][empty] == -1).all()


def test_answers_as_long_as_they_may_be_always_fit():
    for answers, length, longest, multiple in (
        (8, 16, 1 << 20, 1),
        (96, 40, 100, 3),
        (12, 512, 512, 2),
        (7, 30, 300, 7),
    ):
        shapes = PackedShapes.choose(answers, length, max_length=longest, multiple=multiple)
        places = AnswerPlaces.fill(np.full(answers, length), shapes)
        assert places.shape == (shapes.counts[-1], shapes.length) and shapes.length <= max(longest, length)
        assert shapes.counts[-1] * shapes.length == answers * length


def test_numbers_of_rows_are_few_and_divisible():
    shapes = PackedShapes.choose(4096, 1024, max_length=4096, multiple=16)
    assert shapes.length == 1024 and len(shapes.counts) <= MAX_SHAPES and shapes.counts[-1] == 4096
    assert all(count % 16 == 0 for count in shapes.counts) and shapes.counts[0] < 4096 / 4
    ratios = [small / large for small, large in zip(shapes.counts, shapes.counts[1:], strict=False)]
    assert min(ratios) > 0.8
    # An answer of one position each: the smallest number that there is.
    places = AnswerPlaces.fill(np.ones(4096, np.int64), shapes)
    assert places.shape == (shapes.counts[0], 1024)
