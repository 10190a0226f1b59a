"""Packing conserves tokens, keeps targets inside their document, and depends on (seed, epoch, index) alone."""

import itertools
import math

import numpy as np
import pytest

from panax.data import PackedRows, PaddedRows, split
from panax.data.text.packing import PackedRow, permutation

END = 999


def whole_epoch(rows, epoch: int = 0) -> list[PackedRow]:
    return [rows.row(epoch, index) for index in range(rows.num_rows)]


def segments(row: PackedRow) -> list[PackedRow]:
    return [PackedRow(*(leaf[row.segment == s] for leaf in row)) for s in range(1, int(row.segment.max()) + 1)]


@pytest.mark.parametrize("sequence_length", [1, 2, 7, 16, 64, 5000])
@pytest.mark.parametrize("epoch", [0, 3])
def test_each_token_is_in_exactly_one_window_of_an_epoch(many_documents, sequence_length, epoch):
    rows = PackedRows(many_documents, sequence_length=sequence_length, seed=5)
    met = np.concatenate([row.tokens for row in whole_epoch(rows, epoch)])
    assert sorted(met) == sorted(many_documents.store.tokens)
    assert rows.num_rows == math.ceil(many_documents.num_tokens / sequence_length)
    assert sorted(len(r.tokens) for r in whole_epoch(rows, epoch))[1:] == [sequence_length] * (rows.num_rows - 1)


@pytest.mark.parametrize("sequence_length", [1, 2, 7, 64])
def test_a_target_is_the_next_token_of_the_same_document(many_documents, sequence_length):
    tokens = many_documents.store.tokens
    following = {int(a): int(b) for a, b in itertools.pairwise(tokens)}
    for row in whole_epoch(PackedRows(many_documents, sequence_length=sequence_length, seed=1)):
        is_end = row.tokens == END
        np.testing.assert_array_equal(row.loss_mask, ~is_end)  # also at a window's end the true next token is known
        assert row.targets[~is_end].tolist() == [following[int(t)] for t in row.tokens[~is_end]]
        assert not row.targets[is_end].any()


def test_segments_count_from_one_and_positions_from_zero_in_each(many_documents):
    for row in whole_epoch(PackedRows(many_documents, sequence_length=23, seed=2)):
        assert set(np.diff(row.segment)) <= {0, 1} and row.segment[0] == 1
        for part in segments(row):
            assert part.position.tolist() == list(range(len(part.position)))
            assert END not in part.tokens[:-1]  # a segment is of one document
            assert (np.diff(part.tokens[part.tokens != END]) == 1).all()


def test_neighbouring_segments_are_different_documents(many_documents):
    rows = PackedRows(many_documents, sequence_length=23, seed=2)
    for row in whole_epoch(rows):
        for part in segments(row)[:-1]:
            assert part.tokens[-1] == END


def test_only_what_follows_the_prompt_carries_loss(make_store):
    store = make_store([[1, 2, 3, 4], [5, 6], [7, 8]], prompts=[2, 0, 2])
    (row,) = whole_epoch(PackedRows(split(store, 0)[0], sequence_length=20, seed=0))
    learnt = row.targets[row.loss_mask == 1]
    assert sorted(learnt) == [3, 4, 6, END, END, END]
    assert store.target_counts.sum() == 6 and store.target_counts[END] == 3


def test_a_row_is_the_same_whenever_and_in_whatever_order_it_is_made(many_documents):
    places = [(epoch, index) for epoch in (0, 1, 7) for index in range(20)]
    first = PackedRows(many_documents, sequence_length=16, seed=3)
    made = {place: first.row(*place) for place in places}
    second = PackedRows(many_documents, sequence_length=16, seed=3)
    for i in np.random.default_rng(1).permutation(len(places)):
        for ours, theirs in zip(second.row(*places[i]), made[places[i]], strict=True):
            np.testing.assert_array_equal(ours, theirs)


def test_seeds_and_epochs_give_other_orders(many_documents):
    def order(seed: int, epoch: int) -> bytes:
        rows = whole_epoch(PackedRows(many_documents, sequence_length=16, seed=seed), epoch)
        return np.concatenate([row.tokens for row in rows]).tobytes()

    assert len({order(seed, epoch) for seed in (0, 1, -1, 2**40) for epoch in (0, 1, 2)}) == 12


def test_windows_of_one_long_document_are_not_neighbours(make_documents):
    rows = PackedRows(make_documents([900]), sequence_length=10, seed=0)
    begins = np.array([row.tokens[0] for row in whole_epoch(rows)])
    assert (np.diff(begins) == 10).mean() < 0.1


def test_permutation_is_one_and_its_purposes_are_independent():
    orders = [permutation(1000, seed=1, epoch=2, purpose=purpose) for purpose in ("documents", "windows", "held_out")]
    for order in orders:
        assert sorted(order) == list(range(1000))
    assert not (orders[0] == orders[1]).all() and not (orders[1] == orders[2]).all()
    # The first place is taken by each number about equally often.
    first = [permutation(4, seed=seed, epoch=0, purpose="documents")[0] for seed in range(4000)]
    assert np.bincount(first).min() > 900


def test_unpacked_rows_are_one_document_cut_off_and_counted(make_documents):
    lengths = [3, 50, 8, 1, 20]
    documents = make_documents(lengths)
    rows = PaddedRows(documents, sequence_length=10, seed=0)
    assert sorted(len(row.tokens) for row in whole_epoch(rows)) == [1, 3, 8, 10, 10]
    assert (rows.num_truncated_documents, rows.num_truncated_tokens) == (2, 50)
    for row in whole_epoch(rows):
        assert set(row.segment) == {1}
        if row.tokens[-1] == END:
            assert row.loss_mask.tolist() == [1] * (len(row.tokens) - 1) + [0]
        else:  # cut off: the next token is known, and learnt
            assert row.targets[-1] == row.tokens[-1] + 1 and row.loss_mask.all()


def test_unpacked_epochs_hold_each_document_once_in_another_order(many_documents):
    rows = PaddedRows(many_documents, sequence_length=40, seed=0)
    epochs = [[int(row.tokens[0]) for row in whole_epoch(rows, epoch)] for epoch in (0, 1, 0)]
    assert epochs[0] == epochs[2] != epochs[1] and sorted(epochs[0]) == sorted(epochs[1])
    assert sorted(epochs[0]) == sorted(many_documents.store.tokens[many_documents.starts])


def test_a_batch_is_as_long_as_the_smallest_bucket_that_holds_its_longest_row(make_documents):
    rows = PaddedRows(make_documents([3, 50, 8, 1, 20]), sequence_length=32, seed=0, buckets=(4, 8))
    by_length = {len(rows.row(0, i).tokens): i for i in range(5)}
    widths = {length: rows.width(0, np.array([by_length[length], by_length[1]])) for length in (1, 3, 8, 20, 32)}
    assert widths == {1: 4, 3: 4, 8: 8, 20: 32, 32: 32}
