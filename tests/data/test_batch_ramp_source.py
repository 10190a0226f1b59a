"""A global batch that grows: every row once and in the source's order, from any position on, for any process."""

import json

import numpy as np
import pytest
from numpy.testing import assert_array_equal

from panax.core.errors import DataError, RecipeError
from panax.data import Accounting, Arrays, BatchRamp, ExampleSource, IterableSource, PackedRows, PackedSource, RowSource
from panax.data.loading.batch_ramp import RampedSource, apply_batch_ramp
from panax.run.feed import prefetch_to_device

RAMP = BatchRamp(parts=(4, 2), steps=4)
SIZES = [2] * 4 + [4] * 4 + [8] * 4
"""Of 8 rows: one batch in quarters, two in halves, then whole ones."""


def drawn(source, position=None, count=12):
    return [each for each, _ in zip(source.batches(position), range(count))]


def iterable():
    return IterableSource([{"x": np.arange(8) + 8 * n} for n in range(7)], epochs=1)


def examples():
    # Random keys of rows: in an order that is not theirs.
    return ExampleSource(Arrays({"x": np.arange(56)}), batch_size=8, epochs=None, seed=3)


def packed(many_documents):
    return PackedSource(PackedRows(many_documents, sequence_length=16, seed=1), batch_size=8)


@pytest.mark.parametrize("make", [iterable, examples])
def test_rows_are_those_of_the_source_in_its_order(make):
    # One iterator for all stages, so that what can be drawn only once is drawn once.
    found = [batch["x"] for batch, _ in drawn(apply_batch_ramp(make(), RAMP))]
    assert [len(rows) for rows in found] == SIZES
    assert_array_equal(np.concatenate(found), np.concatenate([b["x"] for b, _ in drawn(make(), count=7)]))


@pytest.mark.filterwarnings("ignore:this source can't resume exactly")
@pytest.mark.parametrize("make", [iterable, examples])
def test_every_position_continues_exactly(make):
    whole = drawn(apply_batch_ramp(make(), RAMP))
    for at, (_, position) in enumerate(whole[:-1], start=1):
        position = json.loads(json.dumps(position))
        rest = drawn(apply_batch_ramp(make(), RAMP), position, len(whole) - at)
        assert [batch["x"].tolist() for batch, _ in rest] == [batch["x"].tolist() for batch, _ in whole[at:]]
        assert [after for _, after in rest] == [after for _, after in whole[at:]]
    # Behind the ramp the position is the source's own.
    assert whole[-1].position == drawn(make(), count=7)[-1].position


class Held:
    """A process that holds the odd rows of each batch, or all."""

    row_multiple = 1

    def __init__(self, odd):
        self.odd, self.asked = odd, []

    def held_rows(self, batch_size):
        from panax.train.batch_transfer import HeldRows

        self.asked.append(batch_size)
        return HeldRows(np.arange(1, batch_size, 2), batch_size) if self.odd else None

    def put(self, batch, held=None):
        return {name: (leaf, held.batch_size if held else len(leaf)) for name, leaf in batch.items()}


def test_a_process_makes_the_rows_that_it_holds_of_each_size(many_documents):
    assert isinstance(packed(many_documents), RowSource)
    alone = [batch["tokens"] for batch, _ in drawn(apply_batch_ramp(packed(many_documents), RAMP))]
    process = Held(odd=True)
    with prefetch_to_device(apply_batch_ramp(packed(many_documents), RAMP), process, max_batches=len(SIZES)) as batches:
        fed = list(batches)
    assert [batch["tokens"][1] for batch, _, _ in fed] == SIZES and process.asked == [8, 2, 4, 8]
    assert [number for _, _, number in fed] == list(range(1, 13))
    for (batch, _, _), rows in zip(fed, alone, strict=True):
        assert_array_equal(batch["tokens"][0], rows[1::2])
    # From within a batch of a stage on.
    with prefetch_to_device(
        apply_batch_ramp(packed(many_documents), RAMP), Held(odd=True), fed[4].position, max_batches=3, num_drawn=5
    ) as batches:
        again = list(batches)
    for (batch, position, number), before in zip(again, fed[5:], strict=False):
        assert_array_equal(batch["tokens"][0], before.batch["tokens"][0])
        assert (position, number) == (before.position, before.number)


def test_batches_that_are_left_out_are_numbered_by_step():
    with prefetch_to_device(
        apply_batch_ramp(iterable(), RAMP), Held(odd=False), skipped=(2, 6), max_batches=8
    ) as batches:
        assert [(number, len(batch["x"][0])) for batch, _, number in batches] == [
            (1, 2), (3, 2), (4, 2), (5, 4), (7, 4), (8, 4)
        ]  # fmt: skip


def test_what_was_seen_is_reported_with_the_batch_in_work(many_documents):
    plain, ramp = packed(many_documents), apply_batch_ramp(packed(many_documents), RAMP)
    assert isinstance(ramp, Accounting) and not isinstance(apply_batch_ramp(iterable(), RAMP), Accounting)
    after_one, after_four = drawn(plain, count=4)[0].position, drawn(plain, count=4)[3].position
    steps = drawn(ramp)
    assert ramp.epochs(steps[0].position) == ramp.epochs(steps[3].position) == plain.epochs(after_one)
    assert ramp.epochs(steps[8].position) == plain.epochs(after_four)
    assert_array_equal(ramp.count_documents(steps[8].position)[""].times, plain.count_documents(after_four)[""].times)


def test_data_that_ends_within_the_ramp_ends():
    short = IterableSource([{"x": np.arange(8)}, {"x": np.arange(8)}], epochs=1)
    assert [len(batch["x"]) for batch, _ in apply_batch_ramp(short, RAMP).batches()] == [2] * 4 + [4] * 2
    with prefetch_to_device(apply_batch_ramp(short, RAMP), Held(odd=False)) as batches:
        assert len(list(batches)) == 6


def test_without_a_ramp_a_source_is_itself():
    source = iterable()
    assert apply_batch_ramp(source, BatchRamp()) is source
    assert isinstance(apply_batch_ramp(source, RAMP), RampedSource)


def test_a_position_of_another_ramp_is_refused():
    position = drawn(apply_batch_ramp(iterable(), BatchRamp(parts=(8,), steps=8)))[2].position
    with pytest.raises(
        DataError, match="of another batch ramp: parts \\[8\\] and steps 8, but they are \\[4, 2\\] and 4"
    ):
        apply_batch_ramp(iterable(), RAMP).batches(position)


def test_rows_that_fall_into_no_parts_are_refused():
    odd = IterableSource([{"x": np.arange(6)}], epochs=1)
    with pytest.raises(DataError, match="a batch of 6 rows can't be divided into 4 parts; choose batch_ramp"):
        list(apply_batch_ramp(odd, RAMP).batches())
    rows = ExampleSource(Arrays({"x": np.arange(56)}), batch_size=6, epochs=1)
    with pytest.raises(DataError, match="a batch of 6 rows can't be divided into 4 parts"):
        prefetch_to_device(apply_batch_ramp(rows, RAMP), Held(odd=True))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"parts": (4,)}, "batch_ramp.steps=0; expected both"),
        ({"steps": 8}, "expected both, as parts=\\(8, 4, 2\\) and steps=80, or neither"),
        ({"parts": (2, 4), "steps": 8}, "expected falling numbers of 2 or more"),
        ({"parts": (4, 4), "steps": 8}, "expected falling numbers"),
        ({"parts": (4, 1), "steps": 8}, "expected falling numbers of 2 or more"),
        ({"parts": (8, 4), "steps": 100}, "batch_ramp.steps=100 is not a multiple of 8: .* take 96 or 104"),
        ({"parts": (8,), "steps": 3}, "take 8$"),
    ],
)
def test_ramps_that_make_no_sense_are_refused(settings, message):
    with pytest.raises(RecipeError, match=message):
        BatchRamp(**settings)
