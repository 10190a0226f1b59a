"""Bags of ids from tables, vocabularies by counts, division by time, sequences of users, files inside packages."""

import dataclasses
import zipfile

import numpy as np
import pytest
import xxhash

from panax.core.errors import DataError, RecipeError
from panax.data import (
    Bag,
    Calendar,
    CountVocabulary,
    ExampleData,
    HashBuckets,
    HashedIds,
    IntegerIds,
    Sequences,
    Table,
)

CSV = """when,city,tags,prices,n,bought
2013-01-31 06:00:00,Rome,a|b,1|2,0,3
2013-02-01 23:00:00,Oslo,b,0.5,1,0
2013-03-03 12:00:00,,,,2,9
2013-03-03 12:00:00,Rome,b|c|a,1|2|3,1,2
"""
TAGS = Bag(column="tags", ids=CountVocabulary(min_count=2, hash_buckets=4), capacity=2, too_long="last", separator="|")
BAGS = (Bag(column="city", ids=HashBuckets(buckets=1000)), TAGS, Bag(column="n", ids=IntegerIds(rows=3)))


def written(tmp_path, text=CSV, name="a.csv"):
    (tmp_path / name).write_text(text)
    return (str(tmp_path / name),)


def read(tmp_path, bags=BAGS, text=CSV, bad=0, **settings):
    examples = Table(paths=written(tmp_path, text), bags=bags, **settings).open(tmp_path / "cache", bad)
    return examples, examples.read(np.arange(examples.num_examples))


def test_bags_hold_ids_and_then_nothing(tmp_path):
    for _ in range(2):  # built, then from the cache
        examples, rows = read(tmp_path)
        rome, oslo, none, again = rows["city"][:, 0].tolist()
        assert rome == again != oslo and none == -1 and rows["city"].dtype == np.int32
        # b occurs three times, a twice, c once: it shares the four buckets behind them.
        assert rows["tags"][:3].tolist() == [[1, 0], [0, -1], [-1, -1]]
        assert 2 <= rows["tags"][3, 0] < 6 and rows["tags"][3, 1] == 1
        assert examples.num_ids == {"city": 1000, "tags": 6, "n": 3}


def test_keys_are_64_bits_of_a_hash(tmp_path):
    bag = dataclasses.replace(TAGS, ids=HashedIds(), leaf="keys")
    for _ in range(2):
        rows = read(tmp_path, (bag, Bag(column="city", ids=HashedIds())))[1]
        keys = rows["keys"]
        assert keys.shape == (4, 2, 2) and keys.dtype == np.uint32
        assert (keys[1, 1] == 0).all() and (keys[2] == 0).all() and keys[0].all()
        a, b = (xxhash.xxh64_intdigest(b"tags\0" + each) for each in (b"a", b"b"))
        assert (keys[..., 0].astype(np.uint64) | keys[..., 1].astype(np.uint64) << np.uint64(32)).tolist()[:2] == [
            [a, b],
            [b, 0],
        ]
        assert (rows["city"][0] == rows["city"][3]).all() and (rows["city"][0] != rows["city"][1]).any()
    with pytest.raises(RecipeError, match=r"log_share=True with ids=HashedIds\(\)"):
        Bag(column="city", ids=HashedIds(), log_share=True)


def test_weights_stay_beside_their_ids(tmp_path):
    bag = Bag(column="tags", ids=TAGS.ids, capacity=3, separator="|", weights="prices", leaf="t")
    _, rows = read(tmp_path, (bag,))
    assert rows["t_weights"].tolist() == [[1, 2, 0], [0.5, 0, 0], [0, 0, 0], [1, 2, 3]]
    with pytest.raises(DataError, match=r"line 2: column 'prices' holds '1'; expected 2 finite numbers"):
        read(tmp_path, (bag,), CSV.replace("1|2,", "1,", 1))


def test_shares_of_items_are_counted(tmp_path):
    for _ in range(2):  # built, then from the cache
        _, rows = read(tmp_path, (dataclasses.replace(BAGS[0], log_share=True),))
        np.testing.assert_allclose(np.exp(rows["city_log_share"]), [0.5, 0.25, 0.25, 0.5], rtol=1e-6)
    with pytest.raises(RecipeError, match="called 'city_log_share'"):
        Table(
            paths=("x",),
            bags=(dataclasses.replace(BAGS[0], log_share=True), Bag(column="city_log_share", ids=IntegerIds())),
        )


def test_bags_that_are_too_long_are_bad_rows_or_cut(tmp_path):
    def bag(too_long):
        return Bag(column="tags", ids=TAGS.ids, capacity=2, separator="|", too_long=too_long)

    with pytest.raises(DataError, match=r"a\.csv, line 5: column 'tags' holds 3 values; expected at most capacity=2"):
        read(tmp_path, (bag("bad_record"),))
    examples, _ = read(tmp_path, (bag("bad_record"),), bad=1)
    assert examples.num_examples == 3
    _, first = read(tmp_path, (bag("first"),))
    assert first["tags"][3, 0] == 0 and first["tags"][3, 1] >= 2


def test_an_id_out_of_range_names_column_value_file_and_row(tmp_path):
    expected = r"a\.csv, line 4: column 'n' holds '2'; expected a whole number from 0 to 1 \(rows=2\)"
    with pytest.raises(DataError, match=expected):
        read(tmp_path, (Bag(column="n", ids=IntegerIds(rows=2)),))
    with pytest.raises(DataError, match="column 'n' holds '-1'"):
        read(tmp_path, (Bag(column="n", ids=IntegerIds()),), CSV.replace(",2,9", ",-1,9"))
    with pytest.raises(DataError, match="column 'n' holds '2147483648'"):
        read(tmp_path, (Bag(column="n", ids=IntegerIds()),), CSV.replace(",2,9", f",{2**31},9"))


def test_parts_of_dates_and_labels_above(tmp_path):
    parts = ("month", "day", "weekday", "hour")
    bags = tuple(Bag(column="when", leaf=part, ids=Calendar(part=part)) for part in parts)
    _, rows = read(tmp_path, bags, label="bought", label_above=2)
    assert [rows[part][0, 0] for part in parts] == [0, 30, 3, 6]  # a Thursday
    _, there = read(tmp_path, (Bag(column="when", ids=Calendar(part="hour", zone="America/New_York")),))
    assert there["when"][:2, 0].tolist() == [1, 18]
    with pytest.raises(RecipeError, match="zone='Nowhere' is not in this machine's database"):
        Calendar(part="day", zone="Nowhere")
    assert rows["label"].tolist() == [1, 0, 1, 0]
    with pytest.raises(DataError, match="line 2: column 'city' holds 'Rome'; expected a time"):
        read(tmp_path, (Bag(column="city", ids=Calendar(part="day")),))


def test_lists_of_parquet_are_bags(tmp_path):
    import pyarrow
    from pyarrow import parquet

    parquet.write_table(pyarrow.table({"x": [[3, 1], [], None, [2]], "y": [1.0, 2, 3, 4]}), tmp_path / "a.parquet")
    bag = Bag(column="x", ids=IntegerIds(), capacity=2)
    table = Table(paths=(str(tmp_path / "a.parquet"),), numeric=("y",), bags=(bag,))
    examples = table.open(tmp_path / "cache", 0)
    assert examples.read(np.arange(4))["x"].tolist() == [[3, 1], [-1, -1], [-1, -1], [2, -1]]
    assert examples.num_ids == {"x": 4}
    with pytest.raises(DataError, match="column 'x' is of type list"):
        Table(paths=table.paths, numeric=("x",)).open(tmp_path / "cache", 0)


def test_the_latest_rows_are_held_out(tmp_path):
    opened = ExampleData(
        examples=Table(paths=written(tmp_path), bags=BAGS, numeric=("n",), time="when"), batch_size=2, held_out=0.5,
        split="time", cache_dir=str(tmp_path / "cache"),
    ).open()  # fmt: skip
    assert opened.held_out is not None
    assert opened.held_out.examples.read(np.arange(2))["numeric"][:, 0].tolist() == [2, 1]
    assert opened.train.examples.num_examples == 2
    with pytest.raises(RecipeError, match='split="time", and Arrays has no times'):
        ExampleData(
            examples=Table(paths=written(tmp_path), numeric=("n",)), held_out=0.5, split="time",
            cache_dir=str(tmp_path / "cache"),
        ).open()  # fmt: skip


def test_a_vocabulary_is_counted_again_only_for_other_files(tmp_path):
    paths = written(tmp_path)
    for bags in (BAGS, BAGS[:2]):
        Table(paths=paths, bags=bags).open(tmp_path / "cache", 0)
        assert len([*(tmp_path / "cache").glob("vocabulary-*")]) == 1
    written(tmp_path, CSV + "2014-01-01,Rome,c,1,1,1\n")
    examples = Table(paths=paths, bags=BAGS).open(tmp_path / "cache", 0)
    assert len([*(tmp_path / "cache").glob("vocabulary-*")]) == 2 and examples.num_ids["tags"] == 7


@pytest.mark.parametrize(
    ("bags", "says"),
    [
        ((BAGS[0], BAGS[0]), "two leaves of a batch are called 'city'"),
        ((Bag(column="x", ids=IntegerIds(), leaf="label"),), "called 'label'"),
        (
            (Bag(column="a", ids=IntegerIds(), weights="b"), Bag(column="a_weights", ids=IntegerIds())),
            "called 'a_weights'",
        ),
    ],
)
def test_leaves_of_one_name_are_refused(bags, says):
    with pytest.raises(RecipeError, match=says):
        Table(paths=("x",), bags=bags, label="y")


@pytest.mark.parametrize(
    "make",
    [
        lambda: HashBuckets(buckets=0),
        lambda: CountVocabulary(min_count=0),
        lambda: Bag(column="a", ids=IntegerIds(), capacity=0),
    ],
)
def test_settings_of_bags_are_checked(make):
    with pytest.raises(RecipeError, match="expected"):
        make()


EVENTS = "user\titem\ttime\nu\tx\t30\nu\ty\t10\nu\tz\t20\nv\tx\t1\nv\ty\t2\nw\tx\t1\nw\tx\t2\nw\ty\t2\nw\tx\t7\n"


def sequences(tmp_path, **settings):
    paths = written(tmp_path, EVENTS, "e.tsv")
    return ExampleData(
        examples=Sequences(paths=paths, **settings), split="last", batch_size=2, cache_dir=str(tmp_path / "cache")
    ).open()


def test_sequences_leave_the_last_event_out(tmp_path):
    opened = sequences(tmp_path, last=4)
    # x is the most frequent, then y; v has two events, too few. Events of one time stay in the file's order.
    assert opened.examples.item_names == ("x", "y", "z") and opened.num_ids == {"items": 3}
    assert opened.held_out is not None
    train, last = (part.examples.read(np.arange(2)) for part in (opened.train, opened.held_out))
    assert train["items"].tolist() == [[1, -1, -1, -1], [0, 0, -1, -1]]
    assert train["targets"].tolist() == [[2, -1, -1, -1], [0, 1, -1, -1]]
    assert last["items"].tolist() == [[1, 2, -1, -1], [0, 0, 1, -1]]
    assert last["targets"].tolist() == [[-1, 0, -1, -1], [-1, -1, 0, -1]]
    assert last["times"].tolist() == [[0, 10, 0, 0], [0, 1, 1, 0]]


def test_sequences_may_state_when_each_target_was(tmp_path):
    opened = sequences(tmp_path, last=4, target_times=True)
    assert opened.held_out is not None and "target_times" in opened.held_out.axes
    train, last = (part.examples.read(np.arange(2)) for part in (opened.train, opened.held_out))
    assert train["target_times"].tolist() == [[10, 0, 0, 0], [1, 1, 0, 0]]
    assert last["target_times"].tolist() == [[10, 20, 0, 0], [1, 1, 6, 0]]
    plain = sequences(tmp_path, last=4)
    assert "target_times" not in plain.train.axes
    assert plain.train.examples.fingerprint != opened.train.examples.fingerprint


def test_sequences_read_the_latest_events(tmp_path):
    opened = sequences(tmp_path, last=2)
    assert opened.held_out is not None
    assert opened.held_out.examples.read(np.array([1]))["items"].tolist() == [[0, 1]]
    assert opened.train.examples.fingerprint != opened.held_out.examples.fingerprint
    with pytest.raises(DataError, match="no user has min_events=9 events, of 3 users"):
        sequences(tmp_path, min_events=9)


def test_tables_inside_packages_and_archives(tmp_path, monkeypatch):
    (tmp_path / "shipped" / "data").mkdir(parents=True)
    (tmp_path / "shipped" / "__init__.py").write_text("raise ImportError('it is never imported')")
    with zipfile.ZipFile(tmp_path / "shipped" / "data" / "a.csv.zip", "w") as archive:
        archive.writestr("a.csv", CSV)
    monkeypatch.syspath_prepend(str(tmp_path))
    table = Table(paths=("package:shipped/data/a.csv.zip",), numeric=("n",))
    assert table.open(tmp_path / "cache", 0).num_examples == 4
    for address, says in {"nowhere/a.csv": "not installed", "shipped/../../x": "has no", "shipped/b": "has no"}.items():
        with pytest.raises(DataError, match=says):
            Table(paths=(f"package:{address}",), numeric=("n",)).open(tmp_path / "cache", 0)
