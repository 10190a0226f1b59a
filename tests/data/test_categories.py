"""Which values are one category: the rule is one, and everything that names a category goes by it."""

import decimal

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
from pyarrow import parquet

from panax.core import DataError
from panax.data import Bag, CountVocabulary, ExampleData, HashBuckets, HashedIds, IntegerIds, Sequences, Table
from panax.data.tables.categories import NumberFormats, category_text, is_empty, parse_id, parse_number


def write(folder, *columns):
    """A Parquet file for each, in the order of their names."""
    for number, values in enumerate(columns):
        parquet.write_table(pa.table({"c": values, "y": [0] * len(values)}), folder / f"{number}.parquet")
    return str(folder)


def opened(folder, **settings):
    return ExampleData(
        examples=Table(paths=(str(folder),), label="y", **settings), batch_size=2, cache_dir=str(folder / "cache")
    ).open()


BUCKETS = 1_000_003
WAYS = {
    "categorical": ("categorical", {"categorical": ("c",), "hash_buckets": BUCKETS}),
    "hashed": ("c", {"bags": (Bag(column="c", ids=HashBuckets(buckets=BUCKETS)),)}),
    "vocabulary": ("c", {"bags": (Bag(column="c", ids=CountVocabulary()),)}),
    "keys": ("c", {"bags": (Bag(column="c", ids=HashedIds()),)}),
}


def ids_of(folder, way):
    leaf, settings = WAYS[way]
    examples = opened(folder, **settings).examples
    return np.asarray(examples.read(np.arange(examples.num_examples))[leaf]).reshape(examples.num_examples, -1)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("wide", [[3.0, None], pa.array([decimal.Decimal("3.00"), None]), np.array([3, 4], np.int8)])
@pytest.mark.parametrize("first", [0, 1])
def test_a_whole_number_is_one_category_whatever_its_type_and_order(tmp_path, way, wide, first):
    columns = [[3, 7], wide]
    ids = ids_of(write(tmp_path, *(columns if first == 0 else columns[::-1])) and tmp_path, way)
    assert (ids[0] == ids[2]).all() and not (ids[0] == ids[1]).all()


@pytest.mark.parametrize("way", WAYS)
def test_true_is_not_one_and_the_order_of_files_is_of_no_effect(tmp_path, way):
    for name in "ab":
        (tmp_path / name).mkdir()
    one = ids_of(write(tmp_path / "a", [True, False], [1, 0]) and tmp_path / "a", way)
    other = ids_of(write(tmp_path / "b", [1, 0], [True, False]) and tmp_path / "b", way)
    assert not (one[0] == one[2]).all() and not (one[1] == one[3]).all()
    if way != "vocabulary":
        assert (one[0] == other[2]).all() and (one[2] == other[0]).all()


def test_items_and_users_of_sequences(tmp_path):
    pd.DataFrame({"user": [1, 1, 1], "item": [10, 11, 12], "time": [1, 2, 3]}).to_parquet(tmp_path / "0.parquet")
    pd.DataFrame({"user": [1.0, 1.0, None], "item": [10.0, 13.0, 2.0], "time": [4, 5, 6]}).to_parquet(
        tmp_path / "1.parquet"
    )
    data = ExampleData(
        examples=Sequences(paths=(str(tmp_path),)), batch_size=1, max_bad_records=1, cache_dir=str(tmp_path / "cache")
    )
    examples = data.open().examples
    assert set(examples.item_names) == {"10", "11", "12", "13"} and examples.num_examples == 1
    assert any("1 unusable records are skipped" in note for note in examples.notes)


def test_text_stays_as_it_is_written_and_two_spellings_are_reported(tmp_path):
    (tmp_path / "a.csv").write_text("c,y\n3,0\n4,1\n")
    (tmp_path / "b.csv").write_text("c,y\n3.0,0\n,1\n")
    for way in ("categorical", "hashed", "vocabulary"):
        leaf, settings = WAYS[way]
        columns = opened(tmp_path, **settings)
        ids = columns.examples.read(np.arange(4))[leaf].reshape(4)
        assert ids[0] != ids[2]
        # Also when the table is read from the cache.
        for each in (columns, opened(tmp_path, **settings)):
            assert any("in two ways, as 3 and as '3.0'" in line for line in each.account), each.account
    assert not any("two ways" in line for line in opened(tmp_path, bags=(Bag(column="c", ids=IntegerIds()),)).account)


def test_numbers_are_written_as_files_write_them(tmp_path):
    (tmp_path / "a.csv").write_text("c,y\n1_0,0\n7,1\n")
    for settings in ({"categorical": ("c",)}, {"bags": (Bag(column="c", ids=IntegerIds()),)}):
        with pytest.raises(DataError, match=r"column 'c' holds '1_0'; expected a whole number"):
            opened(tmp_path, **settings)
    (tmp_path / "a.csv").write_text("c,y\n1_000,0\n7,1\n")
    with pytest.raises(DataError, match=r"column 'c' holds '1_000'; expected a finite number"):
        opened(tmp_path, numeric=("c",))
    (tmp_path / "a.csv").write_text("c,y\n3.0,0\n7,1\n")
    columns = opened(tmp_path, categorical=("c",)).examples.read(np.arange(2))["categorical"]
    assert columns.reshape(-1).tolist() == [3, 7]


def test_a_column_whose_name_stands_twice_is_refused(tmp_path):
    (tmp_path / "a.csv").write_text("c,y,c\n1,0,2\n")
    with pytest.raises(DataError, match="two columns 'c'; expected one"):
        opened(tmp_path, numeric=("c",))
    (tmp_path / "a.csv").write_text("c,y,z,z\n1,0,2,3\n")  # one that is not read does no harm
    assert opened(tmp_path, numeric=("c",)).examples.num_examples == 1


def test_longer_bags_that_are_cut_are_counted(tmp_path):
    (tmp_path / "a.csv").write_text("c,y\na|b|c,0\na,1\nb|c,1\n")
    bag = Bag(column="c", ids=HashBuckets(buckets=9), separator="|", too_long="last")
    assert any("2 rows hold more than capacity=1 values" in line for line in opened(tmp_path, bags=(bag,)).account)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (3.0, "3"),
        (-0.0, "0"),
        (np.float32(2), "2"),
        (decimal.Decimal("1E+2"), "100"),
        (b"a", "a"),
        (0.1, "0.1"),
        ("3.0", "3.0"),
        (1e300, "1e+300"),
        (decimal.Decimal("1E+1000000000"), "1E+1000000000"),
        (float("inf"), "inf"),
    ],
)
def test_the_text_of_a_category(value, text):
    assert category_text(value, "c", "here") == text


def test_what_is_a_number_and_what_is_missing():
    assert [parse_id(each) for each in (True, "+7", "7.", "1e3", "٣", "9" * 30, None)] == [
        1,
        7,
        7,
        -1,
        -1,
        -1,
        -1,
    ]
    assert np.isnan([parse_number(each) for each in ("nan", "inf", "0x1", "1__0", "", "a")]).all()
    assert [is_empty(each) for each in (None, "", float("nan"), decimal.Decimal("NaN"), 0, "0")] == [True] * 4 + [
        False
    ] * 2
    spellings = NumberFormats()
    for value in (3, 0.5, "3.5", "03", "x"):
        spellings.add(value)
    assert spellings.note("c") is None
