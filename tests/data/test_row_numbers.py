"""Numbers of rows in place of data: any rows of a batch, from any position on."""

import itertools

import pytest

from panax.core import Source
from panax.core.errors import DataError, RecipeError
from panax.data import RowNumbers, RowSource


def test_resumes_and_gives_single_rows():
    source = RowNumbers(batch_size=6)
    assert isinstance(source, Source) and isinstance(source, RowSource) and source.resume == "exact"
    (_, first), (batch, second) = itertools.islice(source.batches(), 2)
    assert batch["row"].tolist() == list(range(6)) and second == {"batches": 2}
    assert next(source.batches(first)).position == second
    assert next(source.batches_of([1, 4])).batch["row"].tolist() == [1, 4]
    finite = RowNumbers(batch_size=2, num_batches=3)
    assert len(list(finite.batches())) == 3 and len(list(finite.batches({"batches": 2}))) == 1


def test_what_it_refuses():
    with pytest.raises(RecipeError, match="batch_size=0; expected 1 or more rows"):
        RowNumbers(batch_size=0)
    with pytest.raises(DataError, match="is of another source"):
        RowNumbers(batch_size=2).batches({"epoch": 1})
