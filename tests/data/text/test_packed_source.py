"""Batches of tokens: one order for any way of drawing it, exact resume, shapes that never change."""

import itertools
import json

import numpy as np
import pytest

from panax.core import DataError, RecipeError, Source
from panax.data import PackedRows, PackedSource, PaddedRows, prefetch

LEAVES = {"tokens": "int32", "targets": "int32", "loss_mask": "float32", "segment": "int32", "position": "int32"}


def source_of(documents, *, batch_size=4, seed=0, sequence_length=16, **kwargs) -> PackedSource:
    return PackedSource(
        PackedRows(documents, sequence_length=sequence_length, seed=seed), batch_size=batch_size, **kwargs
    )


def take(source, count, position=None):
    return list(itertools.islice(source.batches(position), count))


def assert_equal(ours, theirs):
    assert len(ours) == len(theirs)
    for (a, position_a), (b, position_b) in zip(ours, theirs, strict=True):
        assert position_a == position_b and a.keys() == b.keys()
        for name in a:
            np.testing.assert_array_equal(a[name], b[name])


def test_a_batch_has_the_declared_leaves(many_documents):
    source = source_of(many_documents)
    assert isinstance(source, Source) and source.resume == "exact"
    (batch, _), *_ = take(source, 1)
    assert {name: leaf.dtype.name for name, leaf in batch.items()} == LEAVES
    assert dict(source.axes) == dict.fromkeys(LEAVES, ("batch", "seq"))
    assert all(leaf.shape == (4, 16) for leaf in batch.values())


@pytest.mark.parametrize("batch_size", [1, 3, 4, 70])
def test_resuming_at_any_position_continues_as_if_never_stopped(many_documents, batch_size):
    whole = take(source_of(many_documents, batch_size=batch_size), 120 // batch_size + 3)
    for stop in range(0, len(whole), 1 + len(whole) // 12):
        position = json.loads(json.dumps(whole[stop].position))
        later = take(source_of(many_documents, batch_size=batch_size), len(whole) - stop - 1, position)
        assert_equal(later, whole[stop + 1 :])


def test_training_has_no_short_batch_and_loses_no_token_at_an_epochs_end(many_documents):
    source = source_of(many_documents, batch_size=5)
    per_epoch = source.rows.num_rows
    assert per_epoch % 5
    batches = take(source, per_epoch)  # five whole epochs
    assert all(batch["tokens"].shape == (5, 16) for batch, _ in batches)
    met = np.concatenate([batch["tokens"][batch["segment"] > 0] for batch, _ in batches])
    assert sorted(met) == sorted(np.tile(many_documents.store.tokens, 5))
    assert (batches[-1].position["epoch"], batches[-1].position["index"]) == (5, 0)


def test_a_batch_may_be_larger_than_an_epoch(make_documents):
    source = source_of(make_documents([5, 6]), batch_size=7)
    (batch, position), *_ = take(source, 1)
    assert source.rows.num_rows == 1 and (batch["segment"][:, 0] > 0).all() and position["epoch"] == 7


def test_one_pass_ends_with_padding_in_the_same_shape(many_documents):
    source = source_of(many_documents, batch_size=4, sequence_length=15, epochs=1)
    batches = list(source.batches())
    assert len(batches) == source.num_batches
    assert {batch["tokens"].shape for batch, _ in batches} == {(4, 15)}
    met = np.concatenate([batch["tokens"][batch["segment"] > 0] for batch, _ in batches])
    assert sorted(met) == sorted(many_documents.store.tokens)
    last, position = batches[-1]
    empty = (last["segment"] == 0).all(axis=1)
    assert empty.sum() == -source.rows.num_rows % 4 > 0
    assert not last["loss_mask"][empty].any()
    assert list(source.batches(position)) == []


def test_processes_that_make_only_their_rows_make_the_same_batches(many_documents):
    source = source_of(many_documents, batch_size=6, sequence_length=15, epochs=1)
    parts = [list(source.batches_of(range(begin, begin + 2))) for begin in (0, 2, 4)]
    joined = [
        ({name: np.concatenate([p[0][name] for p in step]) for name in LEAVES}, step[0][1])
        for step in zip(*parts, strict=True)
    ]
    assert_equal(joined, list(source.batches()))


def test_unpacked_batches_have_bucket_lengths_the_same_for_each_process(many_documents):
    rows = PaddedRows(many_documents, sequence_length=32, seed=0, buckets=(16, 24))
    source = PackedSource(rows, batch_size=2, epochs=1)
    all_batches = list(source.batches())
    lengths = [batch["tokens"].shape[1] for batch, _ in all_batches]
    assert set(lengths) == {16, 24, 32}
    assert [batch["tokens"].shape for batch, _ in source.batches_of([1])] == [(1, n) for n in lengths]
    for batch, _ in all_batches:
        longest = (batch["segment"] > 0).sum(axis=1).max()
        assert batch["tokens"].shape[1] == min(n for n in (16, 24, 32) if n >= longest)
        assert not batch["loss_mask"][batch["segment"] == 0].any()
    assert_equal(take(PackedSource(rows, batch_size=2, epochs=1), 99, all_batches[7].position), all_batches[8:])


def test_two_iterators_of_one_source_do_not_disturb_each_other(many_documents):
    source = source_of(many_documents, batch_size=7)
    alone = take(source, 40)
    slow, fast = source.batches(), source.batches(alone[19].position)
    mixed = [(next(slow), next(fast)) for _ in range(20)]
    assert_equal([a for a, _ in mixed] + [b for _, b in mixed], alone)


def test_drawing_ahead_changes_nothing(many_documents):
    source = source_of(many_documents)
    with prefetch(source.batches(), 3) as ahead:
        assert_equal(list(itertools.islice(ahead, 30)), take(source, 30))


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"seed": 8}, "seed 0 was saved, this source has 8"),
        ({"batch_size": 2}, "batch_size 4 was saved, this source has 2"),
        ({"sequence_length": 8}, "sequence_length 16 was saved, this source has 8"),
    ],
)
def test_a_position_of_another_order_is_refused(many_documents, change, named):
    (_, position), *_ = take(source_of(many_documents), 1)
    with pytest.raises(DataError, match=named):
        source_of(many_documents, **change).batches(position)


def test_a_position_of_another_corpus_is_refused(many_documents, make_documents):
    (_, position), *_ = take(source_of(many_documents), 1)
    other = source_of(make_documents([30, 30]))
    with pytest.raises(DataError, match="another corpus") as caught:
        other.batches(position)
    assert position["fingerprint"] in str(caught.value) and other.rows.fingerprint in str(caught.value)


@pytest.mark.parametrize("wrong", [{"epoch": -1}, {"index": 10**6}, {"index": None}, {"epoch": "0"}])
def test_a_damaged_position_is_refused(many_documents, wrong):
    (_, position), *_ = take(source_of(many_documents), 1)
    with pytest.raises(DataError, match="expected 0 <= epoch"):
        source_of(many_documents).batches({**position, **wrong})


def test_sizes_below_one_are_refused(many_documents):
    with pytest.raises(RecipeError, match="batch_size=0"):
        source_of(many_documents, batch_size=0)
