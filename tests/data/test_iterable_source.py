"""Any iterable is a source; it resumes exactly if it can, reports it if it can't, and is checked at the boundary."""

import itertools
import json
import warnings

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from panax.core import DataError, RecipeError, Source
from panax.data import IterableSource


def numbers(count=5, rows=2):
    return [{"x": np.full((rows, 3), i, np.float32)} for i in range(count)]


def values(batches, count) -> list[int]:
    return [int(batch["x"].flat[0]) for batch, _ in itertools.islice(batches, count)]


class GrainLike:
    """The state is on the iterator."""

    def __init__(self, count=5, kind=dict, rows=(2,)):
        self.count, self.kind, self.rows = count, kind, rows

    def __iter__(self):
        return GrainLikeIterator(self.count, self.kind, self.rows)


class GrainLikeIterator:
    def __init__(self, count, kind, rows):
        self.count, self.kind, self.rows, self.next = count, kind, rows, 0

    def __iter__(self):
        return self

    def __next__(self):
        if self.next == self.count:
            raise StopIteration
        self.next += 1
        rows = self.rows[min(self.next - 1, len(self.rows) - 1)]
        return {"x": np.full((rows, 3), self.next - 1, np.float32)}

    def get_state(self):
        return {"next": self.next} if self.kind is dict else json.dumps({"next": self.next}).encode()

    def set_state(self, state):
        assert type(state) is self.kind
        self.next = (state if self.kind is dict else json.loads(state))["next"]


class TorchDataLike:
    """The state is on the loader; a new iterator takes it up, once."""

    def __init__(self, count=5, opaque=False):
        self.count, self.opaque, self.next, self.loaded = count, opaque, 0, False

    def __iter__(self):
        self.next = self.next if self.loaded else 0
        self.loaded = False
        while self.next < self.count:
            self.next += 1
            yield {"x": np.full((2, 3), self.next - 1, np.float32)}

    def state_dict(self):
        return {"next": self.next, **({"generator": object()} if self.opaque else {})}

    def load_state_dict(self, state):
        self.next, self.loaded = state["next"], True


EXACT = {
    "grain": GrainLike,
    "grain with bytes": lambda: GrainLike(kind=bytes),
    "grain's iterator": lambda: iter(GrainLike(count=100)),
    "torchdata": TorchDataLike,
}


@pytest.mark.parametrize("make", EXACT.values(), ids=EXACT.keys())
@pytest.mark.parametrize("look_first", [False, True])
def test_what_keeps_its_state_resumes_exactly(make, look_first):
    uninterrupted = list(itertools.islice(IterableSource(make()).batches(), 12))
    for stop in (0, 3, 4, 5, 9, 10):
        source = IterableSource(make())
        if look_first:
            assert source.resume == "exact"
        later = list(itertools.islice(source.batches(json.loads(json.dumps(uninterrupted[stop].position))), 11 - stop))
        assert [position for _, position in later] == [position for _, position in uninterrupted[stop + 1 :]]
        for ours, theirs in zip(later, uninterrupted[stop + 1 :], strict=True):
            np.testing.assert_array_equal(ours.batch["x"], theirs.batch["x"])


def test_an_iterator_with_state_begins_again_where_it_began():
    source = IterableSource(iter(GrainLike(count=9)))
    assert values(source.batches(), 4) == values(source.batches(), 4) == [0, 1, 2, 3]


@pytest.mark.parametrize("make", [numbers, lambda: TorchDataLike(opaque=True)])
def test_what_can_not_is_replayed_with_a_warning(make):
    source = IterableSource(make())
    assert isinstance(source, Source) and source.resume == "replay"
    position = list(itertools.islice(source.batches(), 7))[-1].position
    assert json.loads(json.dumps(position)) == {"epoch": 1, "index": 2, "batches": 7}
    again = IterableSource(make())
    with pytest.warns(UserWarning, match="7 batches are drawn again and dropped"):
        batches = again.batches(position)
    assert values(batches, 4) == [2, 3, 4, 0]


@pytest.mark.parametrize("state", [{1: 2}, {"at": (1, 2)}, b"\xff\x00", {"rng": np.int64(1)}])
def test_a_state_that_json_would_change_is_not_kept(state):
    class Stateful(GrainLikeIterator):
        def get_state(self):
            return state

    source = IterableSource(Stateful(5, dict, (2,)))
    assert source.resume == "replay" and "state" not in next(source.batches()).position


def test_an_iterable_is_iterated_again_for_each_epoch_or_as_often_as_asked():
    assert values(IterableSource(numbers(3)).batches(), 8) == [0, 1, 2, 0, 1, 2, 0, 1]
    assert values(IterableSource(numbers(3), epochs=2).batches(), 99) == [0, 1, 2, 0, 1, 2]
    with pytest.raises(RecipeError, match="epochs=0"):
        IterableSource(numbers(), epochs=0)


def test_asking_for_the_axes_loses_no_batch_and_starts_no_second_pass():
    starts = []

    class Counted:
        def __iter__(self):
            starts.append(1)
            return iter(numbers(3))

    source = IterableSource(Counted(), epochs=1)
    assert source.axes == {"x": ("batch", None)} and source.resume == "replay"
    assert values(source.batches(), 9) == [0, 1, 2] and len(starts) == 1
    generator = IterableSource(iter(numbers(3)), epochs=1)
    assert generator.axes == {"x": ("batch", None)}
    assert values(generator.batches(), 9) == [0, 1, 2]


def test_an_iterator_that_ends_early_is_an_error_that_reports_it():
    with pytest.raises(DataError, match="the iterator ended after 3 batches, and an iterator can't begin again"):
        list(IterableSource(iter(numbers(3))).batches())
    source = IterableSource(iter(numbers(3)), epochs=1)
    assert values(source.batches(), 9) == [0, 1, 2]
    with pytest.raises(DataError, match="already used up"):
        list(source.batches())


@pytest.mark.parametrize("empty", [[], iter([])])
def test_an_empty_iterable_is_an_error(empty):
    with pytest.raises(DataError, match="gives no batch"):
        next(IterableSource(empty).batches())
    with pytest.raises(DataError, match="gives no batch"):
        print(IterableSource([]).axes)


def test_a_torch_loader_with_tuples():
    data = TensorDataset(torch.arange(20).reshape(10, 2), torch.ones(10, dtype=torch.bfloat16))
    source = IterableSource(DataLoader(data, batch_size=5), names=("tokens", "label"))
    assert source.axes == {"tokens": ("batch", None), "label": ("batch",)}
    first, second, again = itertools.islice(source.batches(), 3)
    assert (first.batch["tokens"].dtype, first.batch["label"].dtype) == (np.int32, np.float32)
    assert second.batch["tokens"].tolist() == np.arange(10, 20).reshape(5, 2).tolist()
    np.testing.assert_array_equal(first.batch["tokens"], again.batch["tokens"])


def test_leaves_without_names_are_numbered_and_may_carry_gradients():
    weight = torch.ones(2, 3, requires_grad=True)
    batch = next(IterableSource([(weight, [1, 2])]).batches()).batch
    assert {name: leaf.dtype.name for name, leaf in batch.items()} == {"0": "float32", "1": "int32"}
    assert list(next(IterableSource([weight]).batches()).batch) == ["0"]


def test_a_short_last_batch_is_dropped_with_one_warning():
    data = TensorDataset(torch.arange(10.0))
    source = IterableSource(DataLoader(data, batch_size=4), names=("x",))
    with pytest.warns(UserWarning, match="the last batch of each epoch is dropped: 2 rows, where others have 4"):
        assert values(source.batches(), 3) == [0, 4, 0]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert values(source.batches(), 5) == [0, 4, 0, 4, 0]


def test_a_short_last_batch_right_after_resuming_is_still_short():
    make = lambda: GrainLike(count=3, rows=(4, 4, 1))  # noqa: E731
    with pytest.warns(UserWarning, match="1 rows, where others have 4"):
        whole = list(itertools.islice(IterableSource(make()).batches(), 4))
    with pytest.warns(UserWarning, match="1 rows, where others have 4"):
        assert values(IterableSource(make()).batches(whole[1].position), 2) == [0, 1]


@pytest.mark.parametrize("rows", [(4, 3, 4), (4, 5)])
def test_batches_of_different_sizes_are_refused(rows):
    with pytest.raises(DataError, match=f"a batch has {rows[1]} rows, others have 4"):
        list(IterableSource([{"x": np.zeros(r)} for r in rows], epochs=1).batches())


@pytest.mark.parametrize(
    ("batch", "says"),
    [
        ({"x": np.zeros((2, 3)), "y": np.zeros(4)}, r"differ in their batch size \('x': 2, 'y': 4\)"),
        ({"x": "a text"}, r"leaf 'x' holds <U6 \(str\); expected an array of numbers"),
        ({"x": [np.zeros(2), np.zeros(3)]}, "leaf 'x' is not an array: .* pad its rows"),
        ({"x": {"y": 1}}, r"leaf 'x' holds object \(dict\)"),
        ({"x": None}, r"leaf 'x' holds object \(NoneType\)"),
        ({"x": 3.0}, "leaf 'x' is a scalar"),
        ({"x": np.array([2**31])}, "leaf 'x' holds 2147483648, which does not fit int32"),
        ({"x": np.array([-(2**31) - 1, 0])}, "leaf 'x' holds -2147483649"),
        ({}, "a batch has no leaf"),
    ],
)
def test_what_is_no_batch_is_refused(batch, says):
    with pytest.raises(DataError, match=says):
        next(IterableSource([batch]).batches())


def test_leaves_and_axes_must_agree():
    batch = {"tokens": np.zeros((2, 3))}
    assert IterableSource([batch], axes={"tokens": ("batch", "seq")}).axes == {"tokens": ("batch", "seq")}
    with pytest.raises(RecipeError, match="expected `batch` first"):
        IterableSource([batch], axes={"tokens": ("seq", "batch")})
    with pytest.raises(DataError, match=r"axes are given for 'token', .* did you mean 'tokens'"):
        next(IterableSource([batch], axes={"token": ("batch",)}).batches())
    with pytest.raises(DataError, match="leaf 'y' has no axes"):
        next(IterableSource([{**batch, "y": np.zeros(2)}], axes={"tokens": ("batch", "seq")}).batches())
    with pytest.raises(DataError, match=r"leaf 'tokens' has the shape \(2, 3\), but the axes \('batch',\)"):
        next(IterableSource([batch], axes={"tokens": ("batch",)}).batches())
    with pytest.raises(DataError, match="a batch has 2 parts; expected 1, named x"):
        next(IterableSource([(np.zeros(2), np.zeros(2))], names=("x",)).batches())
    with pytest.raises(DataError, match="expected those of the first"):
        list(IterableSource([batch, {"other": np.zeros((2, 3))}], epochs=1).batches())


@pytest.mark.parametrize("position", [{}, {"epoch": 0, "index": 1}, {"epoch": 0, "index": -1, "batches": 1}])
def test_a_position_that_is_none_is_refused(position):
    with pytest.raises(DataError, match="is not a position of this source"):
        IterableSource(numbers()).batches(position)


def test_a_state_that_the_source_refuses_is_an_error():
    position = {"epoch": 0, "index": 1, "batches": 1, "state": {"elsewhere": 1}}
    with pytest.raises(DataError, match="refuses the saved state: 'next'; restore with the source that saved it"):
        next(IterableSource(GrainLike()).batches(position))
