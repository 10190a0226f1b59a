"""Examples by number: order, position, division, augmentation, tables, images of each origin, and bad ones among them."""

import dataclasses
import gzip
import io
import tarfile
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from panax.core import DataError, RecipeError, Source
from panax.data import RowSource
from panax.data.images.encoded_images import ImageDecoder
from panax.data.images.images import ImageFolder, ParquetImages, WebDatasetImages
from panax.data.loading.example_data import ExampleData
from panax.data.loading.example_source import ExampleSource
from panax.data.loading.examples import Arrays, ExampleFiles, Examples, split_by_hash
from panax.data.tables.table import Table
from panax.stores import open_store

FIXTURES = Path(__file__).with_name("fixtures")


def numbers(count: int = 11) -> Arrays:
    return Arrays({"x": np.arange(count, dtype=np.int32)})


def drawn(source: ExampleSource, count: int, position=None) -> list:
    return [each for each, _ in zip(source.batches(position), range(count), strict=False)]


def png(value: int, size: tuple[int, int] = (8, 8), mode: str = "RGB") -> bytes:
    out = io.BytesIO()
    Image.new(mode, size, (value,) * 3 if mode == "RGB" else value).save(out, "PNG")
    return out.getvalue()


@pytest.fixture
def folder(tmp_path) -> Path:
    """Two classes of five gray squares each; of the first, `cat`, the values are 0 to 4, of `dog` 100 to 104."""
    for name, base in (("cat", 0), ("dog", 100)):
        (tmp_path / "images" / name).mkdir(parents=True)
        for i in range(5):
            (tmp_path / "images" / name / f"{i}.png").write_bytes(png(base + i))
    return tmp_path / "images"


def test_each_example_once_an_epoch_in_an_order_of_the_seed():
    source = ExampleSource(numbers(), batch_size=3, seed=1)
    assert isinstance(source, Source) and isinstance(source, RowSource)
    seen = np.concatenate([each.batch["x"] for each in drawn(source, 11)])
    for epoch in range(3):
        assert sorted(seen[11 * epoch : 11 * (epoch + 1)]) == list(range(11))
    assert seen[:11].tolist() != seen[11:22].tolist()
    other = np.concatenate([each.batch["x"] for each in drawn(ExampleSource(numbers(), batch_size=3), 11)])
    assert other.tolist() != seen.tolist()


@pytest.mark.parametrize("start", range(0, 9, 4))
def test_any_position_continues_exactly(start):
    source = ExampleSource(numbers(), batch_size=4)
    whole = drawn(source, 10)
    again = drawn(source, 10 - start, whole[start - 1].position if start else None)
    assert [each.batch["x"].tolist() for each in again] == [each.batch["x"].tolist() for each in whole[start:]]
    assert [each.position for each in again] == [each.position for each in whole[start:]]


def test_rows_alone_are_those_of_the_whole_batch():
    source = ExampleSource(numbers(), batch_size=4, epochs=2)
    for each, some in zip(source.batches(), source.batches_of([1, 3]), strict=True):
        assert each.position == some.position
        assert all((each.batch[name][[1, 3]] == some.batch[name]).all() for name in each.batch)


def test_the_last_batch_is_filled_up():
    *_, last = ExampleSource(numbers(), batch_size=4, epochs=1).batches()
    assert last.batch["loss_mask"].tolist() == [1, 1, 1, 0] and last.batch["x"][3] == 0
    assert ExampleSource(numbers(), batch_size=4, epochs=1).num_batches == 3


def test_a_position_of_another_source_is_refused():
    _, position = drawn(ExampleSource(numbers(), batch_size=4), 1)[0]
    for other in (
        ExampleSource(numbers(12), batch_size=4),
        ExampleSource(numbers(), batch_size=5),
        ExampleSource(numbers(), batch_size=4, seed=2),
    ):
        with pytest.raises(DataError, match="the saved data position is of another"):
            other.batches(position)
    with pytest.raises(DataError, match="expected 0 <= epoch and 0 <= index < 11"):
        ExampleSource(numbers(), batch_size=4).batches({**position, "index": 11})
    for wrong in ({"batch_size": 0}, {"batch_size": 1, "epochs": 0}):
        with pytest.raises(RecipeError, match="expected at least 1"):
            ExampleSource(numbers(), **wrong)
    with pytest.raises(RecipeError, match="have a leaf 'loss_mask'"):
        ExampleSource(Arrays({"loss_mask": np.ones(3)}), batch_size=1)


def test_what_is_drawn_at_random_depends_on_seed_epoch_and_example_alone():
    def shift(example, generator):
        return {**example, "x": example["x"] + np.float32(generator.random())}

    def make(batch_size: int, seed: int = 0):
        return ExampleSource(
            Arrays({"x": np.arange(6, dtype=np.float32)}), batch_size=batch_size, seed=seed, augment=shift
        )

    by_two = np.concatenate([each.batch["x"] for each in drawn(make(2), 6)])
    by_three = np.concatenate([each.batch["x"] for each in drawn(make(3), 4)])
    assert by_two.tolist() == by_three.tolist()
    (alone,) = [each.batch["x"] for each, _ in zip(make(3).batches_of([2]), range(1))]
    assert alone.tolist() == [by_three[2]]
    first, second = sorted(by_two[:6]), sorted(by_two[6:])
    assert all(a != b and int(a) == int(b) for a, b in zip(first, second, strict=True))
    assert drawn(make(2, seed=1), 1)[0].batch["x"].tolist() != by_two[:2].tolist()
    with pytest.raises(DataError, match=r"augment gave the leaves \['y'\]; expected \['x'\]"):
        drawn(ExampleSource(numbers(), batch_size=2, augment=lambda example, generator: {"y": example["x"]}), 1)


def test_arrays_are_narrowed_and_checked():
    arrays = Arrays({"x": np.ones((3, 2)), "y": [1, 2, 3]}, axes={"x": ("batch", "embed")})
    assert isinstance(arrays, Examples) and isinstance(arrays, ExampleFiles)
    assert arrays.axes == {"x": ("batch", "embed"), "y": ("batch",)}
    assert {name: leaf.dtype.name for name, leaf in arrays.read(np.array([1])).items()} == {
        "x": "float32",
        "y": "int32",
    }
    assert arrays.fingerprint == Arrays({"y": [1, 2, 3], "x": np.ones((3, 2), np.float32)}).fingerprint
    assert arrays.fingerprint != Arrays({"y": [1, 2, 4], "x": np.ones((3, 2))}).fingerprint
    with pytest.raises(DataError, match=r"\{'x': 3, 'y': 2\} examples; expected one number for all"):
        Arrays({"x": np.ones(3), "y": np.ones(2)})
    with pytest.raises(RecipeError, match="expected one or more arrays by name"):
        Arrays({})
    with pytest.raises(RecipeError, match="axes of 'z'"):
        Arrays({"x": np.ones(3)}, axes={"z": ("batch",)})


def test_the_division_is_by_example_and_stays_when_others_are_added():
    train, held_out = split_by_hash(numbers(1000), 0.2)
    assert held_out is not None and 150 < held_out.num_examples < 250  # 0.2 +- 4 standard deviations of 0.013
    held = set(held_out.read(np.arange(held_out.num_examples))["x"].tolist())
    assert held.isdisjoint(train.read(np.arange(train.num_examples))["x"].tolist())
    assert train.num_examples + held_out.num_examples == 1000
    _, more = split_by_hash(numbers(1500), 0.2)
    assert more is not None
    assert {x for x in more.read(np.arange(more.num_examples))["x"].tolist() if x < 1000} == held
    assert train.fingerprint != held_out.fingerprint != numbers(1000).fingerprint
    assert split_by_hash(numbers(), 0)[1] is None
    with pytest.raises(DataError, match="held_out=1e-06 holds 0 of 11 examples out"):
        split_by_hash(numbers(), 1e-6)
    with pytest.raises(RecipeError, match="held_out=1; expected a fraction"):
        split_by_hash(numbers(), 1)


CSV = "age,city,clicks,bought\n20,Rome,3,1\n30,Oslo,5,0\n,Rome,7,1\n"


def test_tables_from_each_format_are_the_same(tmp_path):
    import pyarrow
    from pyarrow import parquet

    columns = {"age": [20.0, 30.0, None], "city": ["Rome", "Oslo", "Rome"], "clicks": [3, 5, 7], "bought": [1, 0, 1]}
    (tmp_path / "a.csv").write_text(CSV)
    (tmp_path / "a.tsv.gz").write_bytes(gzip.compress(CSV.replace(",", "\t").encode()))
    parquet.write_table(pyarrow.table(columns), tmp_path / "a.parquet", row_group_size=2)
    arrays = {
        name: np.array([np.nan if value is None else value for value in values]) for name, values in columns.items()
    }
    np.savez(tmp_path / "a.npz", **arrays)
    rows_seen = []
    for name in ("a.csv", "a.tsv.gz", "a.parquet", "a.npz"):
        table = Table(
            paths=(str(tmp_path / name),),
            numeric=("age", "clicks"),
            categorical=("city",),
            label="bought",
            missing=-1.0,
            hash_buckets=1000,
        )
        for _ in range(2):  # built, then from the cache
            rows_seen.append(table.open(tmp_path / "cache", 0).read(np.arange(3)))
    for rows in rows_seen:
        assert rows["numeric"].tolist() == [[20, 3], [30, 5], [-1, 7]] and rows["numeric"].dtype == np.float32
        assert rows["label"].tolist() == [1, 0, 1] and rows["label"].dtype == np.float32
        assert rows["categorical"].tolist() == rows_seen[0]["categorical"].tolist()
        rome, oslo, again = rows["categorical"][:, 0].tolist()
        assert rome == again != oslo and rows["categorical"].dtype == np.int32


def test_bad_rows_of_a_table_are_counted_and_passed_over(tmp_path, caplog):
    lines = [
        b"id,n,y",
        b"1,0.5,2",
        b"2,nan,2",
        b"x,0.5,2",
        b"3,0.5",
        b"4,1e99,2",
        b"5,0.5,-1",
        b"6,0.5,\xe9",
        b"7,2.5,3",
    ]
    (tmp_path / "a.csv").write_bytes(b"\n".join(lines))
    table = Table(paths=(str(tmp_path / "a.csv"),), numeric=("n",), categorical=("id",), label="y", label_type="int32")
    with pytest.raises(DataError, match=r"a\.csv, line 5: 2 values; expected 3, as in the heading"):
        table.open(tmp_path / "cache", 0)
    rows = table.open(tmp_path / "cache", 6).read(np.arange(2))
    assert len(caplog.messages) == 6 and all(text.startswith("bad record") for text in caplog.messages)
    assert rows["categorical"].tolist() == [[1], [7]] and rows["label"].tolist() == [2, 3]
    assert rows["label"].dtype == np.int32
    table.open(tmp_path / "cache", 6)
    with pytest.raises(DataError, match=r"6 or more bad records, where max_bad_records=5; the first: .*a\.csv, line"):
        table.open(tmp_path / "cache", 5)


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({}, "expected one or more, each once"),
        ({"numeric": ("a", "a")}, "expected one or more, each once"),
        ({"numeric": ("a",), "hash_buckets": 5}, "hash_buckets=5; expected 1 to"),
    ],
)
def test_tables_that_can_not_be_are_refused(settings, says):
    with pytest.raises(RecipeError, match=says):
        Table(paths=("x",), **settings)


def test_files_that_are_no_table_are_named(tmp_path):
    for name, content in {
        "a.csv": b"b\n1\n",
        "a.npz": b"junk",
        "a.parquet": b"junk",
        "a.xml": b"",
        "e.csv": b"",
    }.items():
        (tmp_path / name).write_bytes(content)
        with pytest.raises(DataError, match=rf"{name}"):
            Table(paths=(str(tmp_path / name),), numeric=("a",)).open(tmp_path / "cache", 0)
    np.savez(tmp_path / "p.npz", a=np.array([{1}], object))
    with pytest.raises(DataError, match=r"p\.npz is not an \.npz file that can be read"):
        Table(paths=(str(tmp_path / "p.npz"),), numeric=("a",)).open(tmp_path / "cache", 0)


def test_a_folder_of_images(folder, tmp_path):
    images = ImageFolder(path=str(folder), size=4).open(tmp_path, 0)
    assert isinstance(images, Examples) and images.classes == ("cat", "dog")
    batch = images.read(np.array([0, 9, 3]))
    assert batch["image"].shape == (3, 4, 4, 3) and batch["image"].dtype == np.uint8
    assert batch["image"][:, 0, 0, 0].tolist() == [0, 104, 3] and batch["label"].tolist() == [0, 1, 0]
    assert images.axes == {"image": ("batch", None, None, None), "label": ("batch",)}
    gray = ImageFolder(path=str(folder), size=4, channels=1, label="none").open(tmp_path, 0)
    assert gray.read(np.array([7]))["image"].shape == (1, 4, 4, 1) and list(gray.axes) == ["image"]
    assert gray.fingerprint != images.fingerprint


def test_labels_from_a_file(folder, tmp_path):
    lines = [f"{name}/{i}.png,{'odd' if i % 2 else 'even'}" for name in ("cat", "dog") for i in range(5)]
    (tmp_path / "labels.csv").write_text("\n".join(["file,label", *lines]))
    images = ImageFolder(path=str(folder), label=str(tmp_path / "labels.csv"), size=4).open(tmp_path, 0)
    assert images.read(np.arange(10))["label"].tolist() == [0, 1, 0, 1, 0] * 2 and images.classes == ("even", "odd")
    (tmp_path / "labels.csv").write_text("\n".join(["file,label", *lines[1:]]))
    with pytest.raises(DataError, match=r"labels\.csv has no label for cat/0\.png"):
        ImageFolder(path=str(folder), label=str(tmp_path / "labels.csv")).open(tmp_path, 0)
    (folder / "lone.png").write_bytes(png(1))
    with pytest.raises(DataError, match=r"lone\.png is in .* itself; expected each image in the folder of its class"):
        ImageFolder(path=str(folder)).open(tmp_path, 0)


def test_a_folder_without_images_is_named(tmp_path):
    (tmp_path / "a.txt").write_text("x")
    with pytest.raises(DataError, match=f"{tmp_path} holds no image; expected files that end in jpg, jpeg"):
        ImageFolder(path=str(tmp_path)).open(tmp_path, 0)
    with pytest.raises(DataError, match=r"a\.txt is not a directory"):
        ImageFolder(path=str(tmp_path / "a.txt")).open(tmp_path, 0)


def test_how_images_are_fitted():
    out = io.BytesIO()
    wide = Image.new("RGB", (30, 10))
    wide.paste((90, 90, 90), (10, 0, 20, 10))
    wide.save(out, "PNG")
    crop, pad, stretch = (
        ImageDecoder(size=10, fit=fit).decode(out.getvalue(), "x")[..., 0] for fit in ("crop", "pad", "stretch")
    )
    assert (crop == 90).all()
    assert (pad[:3] == 0).all() and (pad[4:6, 4:6] == 90).all() and (pad[7:] == 0).all()
    assert (stretch[:, 5] == 90).all() and (stretch[:, 0] == 0).all()
    with pytest.raises(RecipeError, match="size=0; expected at least 1 pixel"):
        ImageDecoder(size=0)


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (b"", "no image that can be decoded; expected JPEG"),
        (png(200, (64, 64), "RGB")[:-40], "no image that can be decoded"),
        (png(40000, (8, 8), "I;16"), "an image of mode 'I;16'; expected 8 bits a channel"),
    ],
    ids=["empty", "cut", "16 bits"],
)
def test_broken_images_are_bad_records_and_the_next_stands_in(folder, tmp_path, caplog, data, says):
    (folder / "cat" / "1.png").write_bytes(data)
    with pytest.raises(DataError, match=rf"^cat/1\.png: .*{says}"):
        ImageFolder(path=str(folder), size=8).open(tmp_path, 0).read(np.arange(10))
    images = ImageFolder(path=str(folder), size=8).open(tmp_path, 1)
    batch = images.read(np.arange(10))
    (message,) = caplog.messages
    assert message.startswith("bad record 1 of at most 1: cat/1.png: ")
    assert batch["image"][:3, 0, 0, 0].tolist() == [0, 2, 2]
    assert images.read(np.array([1]))["image"][0, 0, 0, 0] == 2  # counted once
    # What stands in is of the same side of the division.
    assert images.take(np.array([1, 7])).read(np.array([0]))["label"].tolist() == [1]
    with pytest.raises(DataError, match=r"none of the 1 images can be decoded"):
        images.take(np.array([1])).read(np.array([0]))


def test_a_folder_in_a_store_is_copied_once(folder, tmp_path):
    store = open_store("memory://pictures")
    for path in folder.rglob("*.png"):
        store.write(path.relative_to(folder).as_posix(), [path.read_bytes()])
    remote = ImageFolder(path="memory://pictures", size=4).open(tmp_path, 0)
    local = ImageFolder(path=str(folder), size=4).open(tmp_path, 0)
    for name, leaf in remote.read(np.arange(10)).items():
        assert (leaf == local.read(np.arange(10))[name]).all()
    assert remote.classes == local.classes
    (entry,) = tmp_path.glob("images-*")
    before = (entry / "data.bin").stat().st_mtime_ns
    ImageFolder(path="memory://pictures", size=8).open(tmp_path, 0)
    assert (entry / "data.bin").stat().st_mtime_ns == before
    (entry / "data.bin").write_bytes(b"")
    assert (
        ImageFolder(path="memory://pictures", size=4).open(tmp_path, 0).read(np.arange(10))["label"].tolist()
        == [0] * 5 + [1] * 5
    )


def test_images_in_parquet(tmp_path):
    import pyarrow
    from pyarrow import parquet

    images = [{"bytes": png(10 * i), "path": f"{i}.png"} for i in range(4)]
    parquet.write_table(
        pyarrow.table({"image": images, "label": [1, 0, 1, 0], "name": ["b", "a", None, "a"]}), tmp_path / "a.parquet"
    )
    opened = ParquetImages(paths=(str(tmp_path),), size=4).open(tmp_path / "cache", 0)
    batch = opened.read(np.arange(4))
    assert batch["image"][:, 0, 0, 0].tolist() == [0, 10, 20, 30] and batch["label"].tolist() == [1, 0, 1, 0]
    named = ParquetImages(paths=(str(tmp_path),), size=4, label="name")
    with pytest.raises(DataError, match=r"a\.parquet, row 2: column 'name' holds None"):
        named.open(tmp_path / "cache", 0)
    assert named.open(tmp_path / "cache", 1).classes == ("a", "b")
    with pytest.raises(DataError, match=r"a\.parquet, row 2: column"):
        named.open(tmp_path / "cache", 0)
    with pytest.raises(DataError, match=r"has no column 'picture'; it has"):
        ParquetImages(paths=(str(tmp_path),), image="picture").open(tmp_path / "cache", 0)


def test_images_in_webdataset_shards(tmp_path, caplog):
    shard = str(FIXTURES / "images.tar.gz")
    batch = WebDatasetImages(paths=(shard,), size=4).open(tmp_path, 0).read(np.arange(3))
    assert batch["image"][:, 0, 0, 0].tolist() == [0, 40, 80] and batch["label"].tolist() == [0, 1, 0]
    with tarfile.open(tmp_path / "b.tar", "w") as made:
        for name, content in {
            "a.png": png(5),
            "a.json": b'{"kind": "cat"}',
            "b.json": b'{"kind": "dog"}',
            "c.png": png(6),
            "c.json": b"{",
        }.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            made.addfile(member, io.BytesIO(content))
    images = WebDatasetImages(paths=(str(tmp_path / "b.tar"),), label="json.kind", size=4).open(tmp_path, 2)
    assert images.num_examples == 1 and images.classes == ("cat",)
    assert ["no image; the sample has" in message for message in caplog.messages] == [True, False]


def test_data_of_examples_is_divided_and_drawn(folder, tmp_path):
    data = ExampleData(
        examples=ImageFolder(path=str(folder), size=4), batch_size=4, held_out=0.3, cache_dir=str(tmp_path)
    )
    opened = data.open()
    assert opened.held_out is not None and opened.examples.num_examples == 10
    total = opened.train.examples.num_examples + opened.held_out.examples.num_examples
    assert total == 10 and next(opened.train.batches()).batch["image"].shape == (4, 4, 4, 3)
    assert dataclasses.replace(data, held_out=0.0).open().held_out is None
    arrays = ExampleData(examples=numbers(), batch_size=4).open()
    assert next(arrays.train.batches()).batch["x"].shape == (4,)
    for wrong in ({"batch_size": 0}, {"max_bad_records": -1}, {"held_out": 1.0}):
        with pytest.raises(RecipeError):
            dataclasses.replace(data, **wrong)
