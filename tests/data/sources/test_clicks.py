"""Click logs: Criteo's lines, MLPerf's arrays, and drawn ones with a known best area."""

import gzip
from pathlib import Path

import numpy as np
import pytest

from panax.core.errors import DataError, RecipeError
from panax.data import ClickArrays, CountVocabulary, Criteo, ExampleData, HashBuckets, SyntheticClicks


def line(label="1", numbers=("3", "-2", ""), hashes=("0000001f", "ABCDEF01", "")):
    return "\t".join([label, *numbers, *["7"] * (13 - len(numbers)), *hashes, *["deadbeef"] * (26 - len(hashes))])


def opened(tmp_path, text, bad=0, name="day_0", **settings):
    content = text.encode() if isinstance(text, str) else text
    (tmp_path / name).write_bytes(gzip.compress(content) if name.endswith(".gz") else content)
    return Criteo(paths=(str(tmp_path / name),), **settings).open(tmp_path / "cache", bad)


@pytest.mark.parametrize("name", ["day_0", "day_0.gz"])
def test_criteos_lines(tmp_path, name):
    text = "\n".join([line(), line("0", ("", "12345", "0"), ("1f", "ABCDEF01", "f")), line()]) + "\n"
    for _ in range(2):  # built, then from the cache
        examples = opened(tmp_path, text, name=name, ids=HashBuckets(buckets=10**6))
        rows = examples.read(np.arange(3))
        assert rows["numeric"][:2, :4].tolist() == [[3, -2, 0, 7], [0, 12345, 0, 7]]
        assert rows["label"].tolist() == [1, 0, 1] and rows["c1"].shape == (3, 1) and rows["c1"].dtype == np.int32
        first, second, third = (rows[f"c{n}"][:, 0].tolist() for n in (1, 2, 3))
        # 0000001f is 1f; a missing hash is a value of its own; equal hashes of two columns are two ids.
        assert first[0] == first[1] and second[0] == second[1] and third[0] == third[2] != third[1]
        assert rows["c4"][0, 0] != rows["c5"][0, 0] and examples.num_ids["c26"] == 10**6


def test_a_vocabulary_of_hashes_is_by_counts(tmp_path):
    hashes = ["b", "a", "b", "c", "b", "a", ""]
    text = "\n".join(line(hashes=(each,)) for each in hashes)
    examples = opened(tmp_path, text, ids=CountVocabulary(min_count=2, hash_buckets=3))
    ids = examples.read(np.arange(7))["c1"][:, 0].tolist()
    assert [ids[0], ids[1], ids[2], ids[4], ids[5]] == [0, 1, 0, 0, 1]
    assert 2 <= ids[3] < 5 and 2 <= ids[6] < 5 and examples.num_ids["c1"] == 5 and examples.num_ids["c2"] == 4


def test_bad_lines_are_counted_with_their_places(tmp_path, caplog):
    bad = [
        line("2"),
        line(numbers=("1.5",)),
        line(hashes=("xyz",)),
        line(hashes=("123456789",)),
        "1\t2",
        line(numbers=("-",)),
    ]
    text = "\n".join([line(), *bad, line("0")])
    with pytest.raises(DataError, match=r"day_0, line 2: column 'label' holds '2'; expected 0 or 1"):
        opened(tmp_path, text)
    examples = opened(tmp_path, text, bad=6)
    assert examples.read(np.arange(examples.num_examples))["label"].tolist() == [1, 0]
    assert sorted(message.split(": ")[1].split(", ")[1] for message in caplog.messages) == [
        f"line {n}" for n in range(2, 8)
    ]
    assert "2 fields; expected 40" in caplog.text
    with pytest.raises(DataError, match="6 or more bad records, where max_bad_records=5"):
        opened(tmp_path, text, bad=5)


def test_many_blocks_are_one_table(tmp_path, monkeypatch):
    text = "\n".join(line(str(n % 2), (str(n),), (f"{n:x}",)) for n in range(500))
    read_at_once = opened(tmp_path, text, name="day_0", ids=CountVocabulary()).read(np.arange(500))
    monkeypatch.setattr("panax.data.tables.criteo._BLOCK_BYTES", 4096)
    bad = text.split("\n")
    bad.insert(400, "nothing")
    parts = opened(tmp_path, "\n".join(bad), name="day_1", bad=1, ids=CountVocabulary()).read(np.arange(500))
    assert all((read_at_once[leaf] == parts[leaf]).all() for leaf in read_at_once)
    with pytest.raises(DataError, match=r"day_1, line 401: 1 fields; expected 40"):
        opened(tmp_path, "\n".join(bad), name="day_1", ids=CountVocabulary(min_count=2))


def test_what_is_no_log_is_refused(tmp_path):
    with pytest.raises(DataError, match="has no usable line"):
        opened(tmp_path, "")
    (tmp_path / "day_0.gz").write_bytes(b"\x1f\x8b junk")
    with pytest.raises(DataError, match=r"day_0\.gz can't be read"):
        Criteo(paths=(str(tmp_path / "day_0.gz"),)).open(tmp_path / "cache", 0)
    with pytest.raises(RecipeError, match="ids has 2 entries"):
        Criteo(paths=("x",), ids=(HashBuckets(buckets=1),) * 2)


def arrays(tmp_path, parts=2, multi_hot=False, **changes):
    rng = np.random.default_rng(0)
    for part in range(parts):
        made = {
            "dense": rng.random((5, 4), np.float32),
            "labels": rng.integers(0, 2, (5, 1), np.int32),
            "sparse": rng.integers(0, 10, (5, 3), np.int32),
        } | changes
        many = {str(column): rng.integers(0, 10, (5, column + 1), np.int32) for column in range(3)}
        for name, array in made.items():
            if name == "sparse" and multi_hot:
                np.savez(tmp_path / f"day_{part}_sparse_multi_hot.npz", **many)
            else:
                np.save(tmp_path / f"day_{part}_{name}.npy", array)
    return ClickArrays(path=str(tmp_path), rows=(10, 10, 10))


@pytest.mark.parametrize("multi_hot", [False, True])
def test_mlperfs_arrays_are_read_where_they_are(tmp_path, multi_hot):
    examples = arrays(tmp_path, multi_hot=multi_hot).open(tmp_path / "cache", 0)
    rows = examples.read(np.array([7, 1]))
    assert examples.num_examples == 10 and examples.num_ids == {"c1": 10, "c2": 10, "c3": 10}
    assert (rows["numeric"][0] == np.load(tmp_path / "day_1_dense.npy")[2]).all()
    assert rows["label"].dtype == np.float32 and rows["c3"].shape == (2, 3 if multi_hot else 1)
    if multi_hot:
        assert (rows["c3"][0] == np.load(tmp_path / "day_1_sparse_multi_hot.npz")["2"][2]).all()
    part = examples.take(np.array([7, 8]))
    assert (part.read(np.array([0]))["numeric"] == rows["numeric"][:1]).all()
    assert part.fingerprint != examples.fingerprint and not (tmp_path / "cache").exists()


def test_arrays_that_do_not_fit_are_refused(tmp_path):
    data = arrays(tmp_path, parts=1, sparse=np.full((5, 3), 12, np.int32))
    expected = r"day_0_sparse\.npy, row 3: column 'c1' holds 12; expected a whole number from 0 to 9 \(rows=10\), or modulo=True"
    with pytest.raises(DataError, match=expected):
        data.open(tmp_path, 0).read(np.array([3]))
    modulo = ClickArrays(path=str(tmp_path), rows=(10, 10, 10), modulo=True).open(tmp_path, 0)
    assert modulo.read(np.array([3]))["c1"].tolist() == [[2]]
    with pytest.raises(DataError, match="has 3 columns, and rows= has 1 numbers"):
        ClickArrays(path=str(tmp_path), rows=(10,)).open(tmp_path, 0)
    np.save(tmp_path / "day_0_dense.npy", np.zeros((4, 4), np.float32))
    with pytest.raises(DataError, match=r"the files have \[4, 5\] rows"):
        data.open(tmp_path, 0)


def test_drawn_clicks_are_the_same_in_any_order():
    examples = SyntheticClicks(num_examples=1000, rows=(50, 3), pairs=1).open(Path(), 0)
    rows, some = examples.read(np.arange(1000)), examples.take(np.array([5, 900])).read(np.array([1, 0]))
    assert all((some[leaf] == rows[leaf][[900, 5]]).all() for leaf in rows)
    assert rows["c1"].max() < 50 and np.bincount(rows["c1"][:, 0]).argmax() == 0


def test_no_model_ranks_drawn_clicks_better_than_their_teacher_and_linear_ones_far_worse():
    from scipy import sparse
    from sklearn.linear_model import LogisticRegression
    from sklearn.metrics import roc_auc_score

    settings = SyntheticClicks(num_examples=40_000, rows=(30,) * 6, numeric=2, pairs=4)
    examples = settings.open(Path(), 0)
    numbers = np.arange(settings.num_examples)
    rows, best = examples.read(numbers), examples.bayes_auc()
    assert 0.75 < best < 0.85
    assert roc_auc_score(rows["label"], examples.logits(numbers)) == pytest.approx(best, abs=0.01)
    columns = [sparse.csr_matrix(np.eye(30)[rows[leaf][:, 0]]) for leaf in examples.leaves]
    x = sparse.hstack([*columns, sparse.csr_matrix(rows["numeric"])]).tocsr()
    linear = LogisticRegression(C=0.1, max_iter=200).fit(x[:30_000], rows["label"][:30_000])
    assert roc_auc_score(rows["label"][30_000:], linear.decision_function(x[30_000:])) < best - 0.02


def test_the_days_of_clicks_are_divided_by_time(tmp_path):
    data = ExampleData(examples=arrays(tmp_path), held_out=0.3, split="time", batch_size=4).open()
    assert data.held_out is not None and data.held_out.examples.times.tolist() == [7, 8, 9]


@pytest.mark.parametrize("wrong", [2.5, np.nan, np.inf, -1.0])
def test_ids_that_are_no_whole_numbers_are_refused(tmp_path, wrong):
    data = arrays(tmp_path, parts=1, sparse=np.full((5, 3), wrong, np.float32))
    with pytest.raises(DataError, match=r"column 'c1' holds .*expected a whole number"):
        data.open(tmp_path, 0).read(np.array([3]))


def test_narrow_ids_are_taken_modulo_a_wide_number(tmp_path):
    arrays(tmp_path, parts=1, sparse=np.full((5, 3), 200, np.uint8))
    wide = ClickArrays(path=str(tmp_path), rows=(1000, 1000, 150), modulo=True).open(tmp_path, 0)
    rows = wide.read(np.array([3]))
    assert [rows[leaf].tolist() for leaf in ("c1", "c3")] == [[[200]], [[50]]]


def test_a_vocabulary_may_be_counted_in_other_lines(tmp_path):
    train = "\n".join([line(hashes=("a",) * 3)] + [line(hashes=("b",) * 3)] * 2) + "\n"
    opened(tmp_path, train, ids=CountVocabulary())
    held_out = Criteo(paths=(str(tmp_path / "day_1"),), ids=CountVocabulary())
    (tmp_path / "day_1").write_text("\n".join([line(hashes=("a",) * 3)] * 3) + "\n")
    apart = held_out.open(tmp_path / "cache", 0)
    shared = Criteo(
        paths=(str(tmp_path / "day_1"),), ids=CountVocabulary(counted_in=(str(tmp_path / "day_0"),))
    ).open(tmp_path / "cache", 0)  # fmt: skip
    assert apart.read(np.arange(1))["c1"].item() == 0 and shared.read(np.arange(1))["c1"].item() == 1
    assert shared.id_sets == opened(tmp_path, train, ids=CountVocabulary()).id_sets != apart.id_sets
