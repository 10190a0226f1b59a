"""Files with false sizes or content: refused before memory is taken for them, naming the file, the record and the setting."""

import bz2
import csv
import gzip
import io
import json
import shutil
import tarfile
import tracemalloc
import zipfile
from pathlib import Path

import numpy as np
import pytest

from panax.core import DataError, RecipeError
from panax.data import BadRecord, Document, ImageFolder, Jsonl, Parquet, Table
from panax.data.formats.array_record import ArrayRecord
from panax.data.formats.arrow import Arrow
from panax.data.formats.ipc_sizes import check_ipc_sizes
from panax.data.formats.mds import Mds
from panax.data.formats.records import HuggingFaceDisk
from panax.data.formats.webdataset import WebDataset
from panax.data.images.encoded_images import ImageDecoder

FIXTURES = Path(__file__).with_name("fixtures")
LARGE = 2**25


@pytest.fixture
def little_memory():
    """See that Python takes far less than the bombs become."""
    tracemalloc.start()
    yield
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < LARGE // 4, f"{peak:,} bytes"


@pytest.mark.parametrize("suffix", ["", ".gz"])
def test_a_line_that_is_too_long_is_a_bad_record_and_the_next_is_read(tmp_path, little_memory, suffix):
    path = tmp_path / f"a.jsonl{suffix}"
    with gzip.open(path, "wb") if suffix else path.open("wb") as file:
        file.write(b'{"text": "one"}\n{"text": "')
        for _ in range(LARGE // 2**20):
            file.write(b"a" * 2**20)
        file.write(b'"}\n{"text": "three"}\n')
    first, bad, last = Jsonl(paths=(str(path),), max_record_bytes=2**16).documents()
    assert (first, last) == (Document("one"), Document("three"))
    assert bad == (
        f"{path}, line 2",
        "33,554,445 bytes; expected at most max_record_bytes=65536: raise that setting if this size is right",
    )


@pytest.mark.parametrize("compress", [gzip.compress, bz2.compress])
def test_a_sample_that_is_too_large_is_a_bad_record_and_not_read(tmp_path, compress):
    plain = io.BytesIO()
    with tarfile.open(fileobj=plain, mode="w") as shard:
        for name, size in {"a.txt": 3, "b.txt": LARGE, "c.json": 10, "c.txt": 60_000, "d.txt": 4}.items():
            member = tarfile.TarInfo(name)
            member.size = size
            shard.addfile(member, io.BytesIO(b"a" * size))
    (tmp_path / "a.tar").write_bytes(compress(plain.getvalue()))
    tracemalloc.start()
    first, *bad, last = WebDataset(paths=(str(tmp_path),), max_record_bytes=60_005).documents()
    assert tracemalloc.get_traced_memory()[1] < LARGE // 4
    tracemalloc.stop()
    assert (first, last) == (Document("aaa"), Document("aaaa"))
    assert [record.where for record in bad] == [f"{tmp_path}/a.tar, b", f"{tmp_path}/a.tar, c"]
    assert "33,554,433 bytes; expected at most max_record_bytes=60005" in bad[0].reason


def test_sparse_members_and_endless_headers_of_a_shard_are_refused(tmp_path):
    header = tarfile.TarInfo("a.txt")
    header.size, header.type = 2**40, tarfile.GNUTYPE_SPARSE
    (tmp_path / "sparse.tar").write_bytes(header.tobuf(tarfile.GNU_FORMAT) + bytes(1024))
    header.type = tarfile.XHDTYPE
    (tmp_path / "header.tar").write_bytes(gzip.compress(header.tobuf(tarfile.GNU_FORMAT) + bytes(LARGE)))
    pax = tarfile.TarInfo("b.txt")
    pax.pax_headers = {"GNU.sparse.major": "0", "GNU.sparse.map": "0,1", "GNU.sparse.size": str(2**40)}
    (tmp_path / "pax.tar").write_bytes(pax.tobuf(tarfile.PAX_FORMAT) + bytes(1024))
    for name in ("sparse", "header", "pax"):
        with pytest.raises(DataError, match=rf"{name}\.tar can't be read: .*; expected plain"):
            list(WebDataset(paths=(str(tmp_path / f"{name}.tar"),)).documents())


def test_shards_of_mds_that_become_too_large_are_refused(tmp_path):
    shutil.copytree(FIXTURES / "mds_plain", tmp_path / "mds")
    with pytest.raises(
        DataError, match=r"shard\.00000\.mds: \d+ bytes; expected at most max_shard_bytes=100: raise that"
    ):
        list(Mds(path=str(tmp_path / "mds"), max_shard_bytes=100).documents())
    bad = next(Mds(path=str(tmp_path / "mds"), max_record_bytes=10).documents())
    assert isinstance(bad, BadRecord) and "expected at most max_record_bytes=10" in bad.reason
    index = json.loads((tmp_path / "mds" / "index.json").read_text())
    shard = index["shards"][0]
    for kind, compress in (("gz", gzip.compress), ("bz2", bz2.compress)):
        shard |= {"compression": kind, "zip_data": {"basename": "bomb", "bytes": 1, "hashes": {}}}
        (tmp_path / "mds" / "bomb").write_bytes(compress(bytes(LARGE)))
        (tmp_path / "mds" / "index.json").write_text(json.dumps(index))
        tracemalloc.start()
        with pytest.raises(DataError, match=r"bomb is larger than the \d+ bytes that index\.json states"):
            list(Mds(path=str(tmp_path / "mds")).documents())
        assert tracemalloc.get_traced_memory()[1] < LARGE // 4
        tracemalloc.stop()


def npz_of(path: Path, header: bytes, data: bytes = b"", method: int = zipfile.ZIP_DEFLATED) -> str:
    with zipfile.ZipFile(path, "w", method) as archive:
        archive.writestr("a.npy", b"\x93NUMPY\1\0" + len(header).to_bytes(2, "little") + header + data)
    return str(path)


@pytest.mark.parametrize(
    ("header", "method", "says"),
    [
        (b"{'descr': '<f4', 'fortran_order': False, 'shape': (2305843009213693951,)}", 8, "an array ends"),
        (b"{'descr': '<f4', 'fortran_order': False, 'shape': (-1,)}", 8, "none below 0"),
        (b"{'descr': '<U500000000', 'fortran_order': False, 'shape': (1,)}", 8, "at most max_record_bytes=67108864"),
        (b"{'descr': '|O', 'fortran_order': False, 'shape': (1,)}", 8, "holds objects, which are pickled"),
        (b"{'descr': '<f4', 'fortran_order': False, 'shape': (1,)}", 12, "is compressed with method 12"),
    ],
)
def test_arrays_whose_headers_lie_are_refused(tmp_path, little_memory, header, method, says):
    path = npz_of(tmp_path / "a.npz", header, bytes(4096), method)
    with pytest.raises(DataError, match=rf"a\.npz.*({says})"):
        Table(paths=(path,), numeric=("a",)).open(tmp_path / "cache", 0)


def test_arrays_are_read_a_block_at_a_time(tmp_path):
    np.savez_compressed(tmp_path / "a.npz", a=np.arange(9000, dtype=np.float64), b=np.arange(9000))
    examples = Table(paths=(str(tmp_path / "a.npz"),), numeric=("a",), label="b").open(tmp_path / "cache", 0)
    assert examples.read(np.array([77, 8999]))["numeric"][:, 0].tolist() == [77, 8999]


@pytest.mark.parametrize("content", [b"a" * LARGE, b"a,b\n" + b'"x\n",' * (LARGE // 5)])
def test_rows_without_an_end_are_refused(tmp_path, content):
    (tmp_path / "a.csv.gz").write_bytes(gzip.compress(content))
    with pytest.raises(
        DataError, match=r"a\.csv\.gz, line \d+: 1,001 bytes or more; expected at most max_record_bytes=1000"
    ):
        Table(paths=(str(tmp_path),), numeric=("a",), max_record_bytes=1000).open(tmp_path / "cache", 0)


def test_labels_that_are_no_csv_are_named(tmp_path):
    from PIL import Image

    Image.new("L", (4, 4)).save(tmp_path / "a.png")
    (tmp_path / "labels.csv").write_text("file,label\na.png," + "x" * (csv.field_size_limit() + 1))
    with pytest.raises(DataError, match=r"labels\.csv: field larger than field limit"):
        ImageFolder(path=str(tmp_path), label=str(tmp_path / "labels.csv")).open(tmp_path / "cache", 0)


def parquet(path: Path, texts: list[str], **settings) -> str:
    import pyarrow
    from pyarrow import parquet

    parquet.write_table(pyarrow.table({"text": texts}), path, compression="zstd", **settings)
    return str(path)


def test_pages_and_values_of_parquet_have_a_bound(tmp_path):
    path = parquet(tmp_path / "a.parquet", ["one", "a" * LARGE], use_dictionary=False)
    with pytest.raises(
        DataError, match=r"a\.parquet, row group 0, column 'text': a page has 33,\d+,\d+ bytes; expected at most 4"
    ):
        list(Parquet(paths=(path,), max_record_bytes=2**20).documents())
    first, bad = Parquet(paths=(path,), max_record_bytes=2**24).documents()
    assert (
        first == Document("one")
        and bad.where == f"{path}, row 1"
        and "33,554,432 bytes; expected at most" in bad.reason
    )
    assert len(list(Parquet(paths=(path,)).documents())[1].text) == LARGE
    path = parquet(
        tmp_path / "b.parquet", [str(i) * 100 for i in range(5000)], row_group_size=1500, data_page_size=2000
    )
    assert list(Parquet(paths=(path,)).documents()) == [Document(str(i) * 100) for i in range(5000)]


@pytest.mark.parametrize("settings", [{}, {"use_dictionary": False, "column_encoding": {"text": "DELTA_BYTE_ARRAY"}}])
def test_one_text_that_stands_for_many_takes_the_memory_of_few(tmp_path, settings):
    import pyarrow

    path = parquet(tmp_path / "a.parquet", ["a" * 2**20] * 120, dictionary_pagesize_limit=2**22, **settings)
    tracemalloc.start()
    before = pyarrow.total_allocated_bytes()
    peak_bytes = 0
    for document in Parquet(paths=(path,), max_record_bytes=2**21).documents():
        assert len(document.text) == 2**20
        peak_bytes = max(peak_bytes, pyarrow.total_allocated_bytes() - before)
    assert peak_bytes < 60 * 2**20 and tracemalloc.get_traced_memory()[1] < 60 * 2**20
    tracemalloc.stop()


def test_columns_of_lists_are_refused_before_they_are_read(tmp_path):
    import pyarrow
    from pyarrow import parquet

    parquet.write_table(pyarrow.table({"text": [["a"]], "s": [{"b": 1}]}), tmp_path / "a.parquet")
    with pytest.raises(DataError, match=r"column 'text' is of type list<.*>; expected one value a row"):
        list(Parquet(paths=(str(tmp_path),)).documents())
    (bad,) = Parquet(paths=(str(tmp_path),), text="s").documents()
    assert "field 's' is of type dict" in bad.reason


def write_arrow(path: Path, table, compression: str | None = None, stream: bool = False) -> Path:
    from pyarrow import ipc

    options = ipc.IpcWriteOptions(compression=compression)
    with (ipc.new_stream if stream else ipc.new_file)(str(path), table.schema, options=options) as writer:
        writer.write_table(table)
    return path


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("dictionary", [False, True])
def test_compressed_batches_have_a_bound(tmp_path, stream, dictionary):
    import pyarrow

    texts = pyarrow.array(["a" * 2**20, "b"])
    table = pyarrow.table({"text": texts.dictionary_encode() if dictionary else texts})
    path = write_arrow(tmp_path / "a.arrow", table, "zstd", stream)
    check_ipc_sizes(path, "a", 2**21, "most")
    with pytest.raises(
        DataError, match=r"a\.arrow, message [01]: 1,048,\d+ bytes; expected at most max_batch_bytes=1000"
    ):
        list(Arrow(paths=(str(path),), max_batch_bytes=1000).documents())
    assert [len(document.text) for document in Arrow(paths=(str(path),)).documents()] == [2**20, 1]
    data = bytearray(path.read_bytes())
    at = data.index((2**20 + 1).to_bytes(8, "little"))
    data[at : at + 8] = (2**50).to_bytes(8, "little")
    path.write_bytes(data)
    with pytest.raises(DataError, match=r"1,125,899,9\d\d,\d+,\d+ bytes; expected at most max_batch_bytes=2147483648"):
        list(Arrow(paths=(str(path),)).documents())


@pytest.mark.parametrize("kind", ["string", "large_string", "dictionary", "string_view"])
def test_offsets_and_indices_beyond_their_buffers_are_found(tmp_path, kind):
    import pyarrow

    texts = pyarrow.array([f"text {i}" * 9 for i in range(64)])
    if kind == "dictionary":
        texts = pyarrow.DictionaryArray.from_arrays(pyarrow.array(np.full(64, 63, np.int32)), texts)
    else:
        texts = texts.cast(getattr(pyarrow, kind)())
    path = write_arrow(tmp_path / "a.arrow", pyarrow.table({"text": texts}))
    assert len(list(Arrow(paths=(str(path),)).documents())) == 64
    data = bytearray(path.read_bytes())
    wanted = {
        "string": np.array([54, 108, 162], "<i4"),
        "large_string": np.array([54, 108, 162], "<i8"),
        "dictionary": np.array([63, 63, 63], "<i4"),
        "string_view": np.array([54], "<i4"),
    }[kind].tobytes()
    at = data.index(wanted) + (12 if kind == "string_view" else 0)
    data[at : at + 4] = (2**30).to_bytes(4, "little")
    path.write_bytes(data)
    with pytest.raises(DataError, match=r"a\.arrow can't be read: "):
        list(Arrow(paths=(str(path),)).documents())


def test_a_dataset_on_the_disk_is_checked_before_it_is_read(tmp_path):
    import datasets

    datasets.Dataset.from_dict({"text": [f"text {i}" for i in range(9)]}).save_to_disk(str(tmp_path / "d"))
    corpus = HuggingFaceDisk(path=str(tmp_path / "d"))
    assert len(list(corpus.documents())) == 9
    (path,) = tmp_path.glob("d/*.arrow")
    data = bytearray(path.read_bytes())
    at = data.index(np.array([6, 12, 18], "<i4").tobytes())
    data[at : at + 4] = (2**30).to_bytes(4, "little")
    path.write_bytes(data)
    with pytest.raises(DataError, match="can't be"):
        list(corpus.documents())


@pytest.mark.parametrize("group", [1, 3])
def test_chunks_and_records_of_array_record_have_a_bound(tmp_path, group):
    from array_record.python.array_record_module import ArrayRecordWriter  # pyright: ignore

    path = tmp_path / "a.array_record"
    writer = ArrayRecordWriter(str(path), f"group_size:{group}")
    for size in (10, 2**20, 70_000, 20):
        writer.write(b"a" * size)
    writer.close()
    assert path.stat().st_size < 2**18
    assert [len(document.text) for document in ArrayRecord(paths=(str(path),)).documents()] == [10, 2**20, 70_000, 20]
    _, bad, *_ = records = list(ArrayRecord(paths=(str(path),), max_record_bytes=2**19).documents())
    assert (
        len(records) == 4
        and bad.where == f"{path}, record 1"
        and bad.reason.startswith("1,048,576 bytes; expected at most")
    )
    with pytest.raises(
        DataError, match=r"a\.array_record, the chunk at byte \d+: 1,\d+,\d+ bytes; expected at most 4 \* max"
    ):
        list(ArrayRecord(paths=(str(path),), max_record_bytes=2**17).documents())


def encoded(kind: str, size: tuple[int, int]) -> bytes:
    from PIL import Image

    file = io.BytesIO()
    Image.new("RGB" if kind != "GIF" else "L", size).save(file, kind)
    return file.getvalue()


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP", "BMP", "GIF", "TIFF", "PPM"])
def test_images_of_the_documented_formats_up_to_a_number_of_pixels(kind):
    decoding = ImageDecoder(size=8, max_pixels=200)
    assert decoding.decode(encoded(kind, (10, 20)), "a").shape == (8, 8, 3)
    with pytest.raises(DataError, match="a: an image of 10 by 21, 210 pixels; expected at most max_pixels=200"):
        decoding.decode(encoded(kind, (10, 21)), "a")
    with pytest.raises(RecipeError, match="max_pixels=0; expected 1 to 178956970"):
        ImageDecoder(max_pixels=0)


def test_no_program_is_started_for_an_image(tmp_path, monkeypatch):
    script = tmp_path / "gs"
    script.write_text(f"#!/bin/sh\ntouch {tmp_path}/started\n")
    script.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    eps = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 10 10\n%%EndComments\nshowpage\n%%EOF\n"
    with pytest.raises(
        DataError, match="a: no image that can be decoded; expected JPEG, PNG, WEBP, BMP, GIF, TIFF or PPM"
    ):
        ImageDecoder(size=8).decode(eps, "a")
    assert not (tmp_path / "started").exists()


def test_an_image_file_that_is_too_large_is_not_read(tmp_path):
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "a.png").write_bytes(encoded("PNG", (4, 4)))
    with (tmp_path / "a" / "b.png").open("wb") as file:
        file.truncate(2**40)
    images = ImageFolder(path=str(tmp_path), size=4).open(tmp_path / "cache", 1)
    assert images.read(np.array([0, 1]))["image"].shape == (2, 4, 4, 3)
    assert "1,099,511,627,776 bytes; expected at most max_record_bytes=67108864" in images._skipped.bad[0].reason


@pytest.mark.parametrize("corpus", [Jsonl, Parquet, Arrow, ArrayRecord, WebDataset, Mds, HuggingFaceDisk, Table])
def test_a_bound_is_a_number_from_1(corpus):
    where = {"path": "a"} if corpus in (Mds, HuggingFaceDisk) else {"paths": ("a",)}
    with pytest.raises(RecipeError, match="max_record_bytes=0; expected a whole number of at least 1, in bytes"):
        corpus(max_record_bytes=0, **where)
