"""A dimension that varies is padded to a few sizes, and nothing else changes."""

import itertools

import numpy as np
import pytest

from panax.core import DataError, RecipeError, Source
from panax.data import BucketedSource, IterableSource

AXES = {"tokens": ("batch", "seq"), "pairs": ("batch", "seq", None), "label": ("batch",)}


def batch(length: int) -> dict[str, np.ndarray]:
    tokens = np.arange(1, 2 * length + 1, dtype=np.int32).reshape(2, length)
    pairs = np.ones((2, length, 3), np.float32)
    return {"tokens": tokens, "pairs": pairs, "label": np.array([1, 2], np.int32)}


def source(*lengths: int) -> IterableSource:
    return IterableSource([batch(length) for length in lengths], axes=AXES, epochs=1)


def test_each_batch_gets_the_smallest_bucket_that_holds_it():
    bucketed = BucketedSource(source(1, 4, 5, 8), (8, 4))
    assert isinstance(bucketed, Source) and bucketed.axes == AXES and bucketed.resume == "replay"
    assert bucketed.buckets == (4, 8)
    for (padded, _), length in zip(bucketed.batches(), (1, 4, 5, 8), strict=True):
        size = 4 if length <= 4 else 8
        assert padded["tokens"].shape == (2, size) and padded["pairs"].shape == (2, size, 3)
        for name, leaf in batch(length).items():
            assert padded[name].dtype == leaf.dtype
        np.testing.assert_array_equal(padded["tokens"][:, :length], batch(length)["tokens"])
        assert not padded["tokens"][:, length:].any() and not padded["pairs"][:, length:].any()
        np.testing.assert_array_equal(padded["label"], [1, 2])


def test_leaves_are_filled_as_asked_and_a_mask_is_added():
    bucketed = BucketedSource(source(2), (3,), pad={"tokens": -1}, mask="real")
    ((padded, _),) = bucketed.batches()
    assert padded["tokens"].tolist() == [[1, 2, -1], [3, 4, -1]]
    assert padded["real"].tolist() == [[1, 1, 0]] * 2 and padded["real"].dtype == np.float32
    assert bucketed.axes == {**AXES, "real": ("batch", "seq")}


def test_positions_are_those_of_the_source():
    whole = list(source(1, 2, 3).batches())
    assert [after for _, after in BucketedSource(source(1, 2, 3), (4,)).batches()] == [after for _, after in whole]
    with pytest.warns(UserWarning, match="drawn again"):
        later = list(itertools.islice(BucketedSource(source(1, 2, 3), (4,)).batches(whole[1].position), 9))
    assert len(later) == 1 and later[0].batch["tokens"].tolist() == [[1, 2, 3, 0], [4, 5, 6, 0]]


def test_a_batch_longer_than_the_largest_bucket_is_refused():
    with pytest.raises(DataError, match="a batch has 9 along 'seq', more than the largest bucket, 8"):
        list(BucketedSource(source(9), (4, 8)).batches())


def test_leaves_that_differ_in_length_are_refused():
    uneven = {**batch(3), "pairs": np.ones((2, 4, 3), np.float32)}
    with pytest.raises(DataError, match=r"differ along 'seq': \{'tokens': 3, 'pairs': 4\}"):
        list(BucketedSource(IterableSource([uneven], axes=AXES), (4,)).batches())


def test_what_has_no_effect_is_refused():
    with pytest.raises(RecipeError, match="no leaf has the axis 'time'"):
        BucketedSource(source(1), (4,), axis="time")
    with pytest.raises(RecipeError, match="no effect on label"):
        BucketedSource(source(1), (4,), pad={"label": 3})
    with pytest.raises(RecipeError, match="mask='label' is already a leaf"):
        BucketedSource(source(1), (4,), mask="label")
    for buckets in ((), (0, 4)):
        with pytest.raises(RecipeError, match="expected one or more sizes"):
            BucketedSource(source(1), buckets)
