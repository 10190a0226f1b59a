"""JSON records as lines or as one array, plain or compressed: as a stream, whatever the file is called, and bombs are refused."""

import bz2
import gzip
import json
import lzma
import sys
import tracemalloc

import numpy as np
import pyarrow as pa
import pytest
from pyarrow import feather, parquet

from panax.core import DataError
from panax.data import (
    Arrow,
    BadRecord,
    BytePairTokenizer,
    ConcatCorpus,
    Document,
    HuggingFaceDisk,
    Jsonl,
    Parquet,
    TextData,
    TextFiles,
    WebDataset,
    make_corpus,
)
from panax.data.files import decompression as compressed_files
from panax.data.formats.json_records import is_json_records

if sys.version_info >= (3, 14):
    from compression import zstd
else:
    from backports import zstd

COMPRESS = {"gz": gzip.compress, "bz2": bz2.compress, "xz": lzma.compress, "zst": zstd.compress}
RECORDS = [{"text": f"the oak {number} é"} for number in range(5)]
LINES = "".join(json.dumps(record, ensure_ascii=False) + "\n" for record in RECORDS).encode()
DOCUMENTS = [Document(record["text"]) for record in RECORDS]


def documents(path, **settings):
    return list(Jsonl(paths=(str(path),), **settings).documents())


@pytest.mark.parametrize("kind", COMPRESS)
@pytest.mark.parametrize("name", ["a.jsonl.{}", "a.jsonl", "a.json.{}", "a"])
def test_compressed_lines_are_read_whatever_the_file_is_called(tmp_path, kind, name):
    path = tmp_path / name.format(kind)
    # Two streams one after the other, as `cat` makes them.
    half = len(LINES.split(b"\n")[0]) + 1
    path.write_bytes(COMPRESS[kind](LINES[:half]) + COMPRESS[kind](LINES[half:]))
    assert documents(path) == DOCUMENTS
    assert list(make_corpus(path).documents()) == DOCUMENTS
    assert list(make_corpus(tmp_path).documents()) == DOCUMENTS


@pytest.mark.parametrize("kind", COMPRESS)
def test_a_compressed_file_that_is_cut_or_damaged_is_named(tmp_path, kind):
    packed = COMPRESS[kind](LINES * 50)
    for content in (packed[:-9], packed[:40] + bytes(20) + packed[60:]):
        (tmp_path / "a.jsonl").write_bytes(content)
        with pytest.raises(DataError, match=r"a\.jsonl can't be read"):
            assert len(documents(tmp_path / "a.jsonl")) != 250


@pytest.mark.parametrize("kind", COMPRESS)
def test_a_bomb_is_refused_before_it_takes_memory(tmp_path, monkeypatch, kind):
    monkeypatch.setattr(compressed_files, "UNCHECKED_BYTES", 2**20)
    monkeypatch.setattr(compressed_files, "MAX_RATIO", 100)
    (tmp_path / "a.jsonl").write_bytes(COMPRESS[kind](b'{"text": "' + b"a" * 2**25))
    tracemalloc.start()
    try:
        with pytest.raises(DataError, match=r"become .* bytes or more; expected at most 100 times as many"):
            documents(tmp_path / "a.jsonl", max_record_bytes=2**16)
        assert tracemalloc.get_traced_memory()[1] < 2**24
    finally:
        tracemalloc.stop()


def test_other_compressions_are_named(tmp_path):
    (tmp_path / "a.jsonl").write_bytes(b"\x04\x22\x4d\x18" + bytes(40))
    with pytest.raises(DataError, match=r"a\.jsonl is compressed with lz4, which is not supported"):
        documents(tmp_path / "a.jsonl")
    (tmp_path / "a.txt").write_bytes(COMPRESS["zst"](b"the oak"))
    (bad,) = TextFiles(paths=(str(tmp_path / "a.txt"),)).documents()
    assert "compressed (zstd)" in bad.reason and "iconv" not in bad.reason
    (tmp_path / "a.txt").write_bytes(b"PAR1\xff" + bytes(9))
    (bad,) = TextFiles(paths=(str(tmp_path / "a.txt"),)).documents()
    assert "format Parquet" in bad.reason


def test_without_the_library_zstd_explains_what_to_install(tmp_path, monkeypatch):
    (tmp_path / "a.jsonl.zst").write_bytes(COMPRESS["zst"](LINES))
    for name in ("backports", "backports.zstd", "compression", "compression.zstd"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(DataError, match=r"reads with the package backports\.zstd"):
        documents(tmp_path / "a.jsonl.zst")


@pytest.mark.parametrize("indent", [None, 2])
def test_an_array_is_read_an_element_at_a_time(tmp_path, indent):
    path = tmp_path / "alpaca.json"
    path.write_text("\ufeff" + json.dumps(RECORDS, indent=indent), encoding="utf-8")
    assert documents(path) == DOCUMENTS == list(make_corpus(path).documents())
    path.write_text("[]")
    assert documents(path) == []
    path.write_text(json.dumps([{"text": "a"}, 7, {"text": 1}, {"text": "b"}]))
    docs = documents(path)
    assert [type(each) for each in docs] == [Document, BadRecord, BadRecord, Document]
    assert docs[1].where.endswith("record 2") and "a JSON int" in docs[1].reason


def test_a_large_array_takes_the_memory_of_one_element(tmp_path):
    path = tmp_path / "a.json"
    with path.open("w") as file:
        file.write("[")
        for number in range(4000):
            file.write(("," if number else "") + json.dumps({"text": f"{number} " + "x" * 2000}))
        file.write("]")
    tracemalloc.start()
    try:
        assert sum(1 for _ in Jsonl(paths=(str(path),)).documents()) == 4000
        assert tracemalloc.get_traced_memory()[1] < 2**20 < path.stat().st_size
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ('[{"text": "a"} {"text": "b"}]', r"record 1: it is followed by '\{'"),
        ('[{"text": "a"}', "record 1: it is followed by the end of the file"),
        ('[{"text": "a"},', "record 2: broken JSON"),
        ('[{"text": "a"},]', "record 2: broken JSON"),
        ('[{"text": tru}]', "record 1: broken JSON"),
        ('[{"text": "a"}]]', "the JSON array is followed by"),
        ('[{"text": "' + "a" * 300_000 + '"}]', r"expected at most max_record_bytes=200000"),
    ],
)
def test_a_broken_array_is_an_error_with_its_place(tmp_path, text, reason):
    (tmp_path / "a.json").write_text(text)
    with pytest.raises(DataError, match=reason):
        documents(tmp_path / "a.json", max_record_bytes=200_000)


def test_a_number_at_the_border_of_what_is_read_is_whole(tmp_path):
    (tmp_path / "a.json").write_text("[" + " " * (2**16 - 4) + '12345, {"text": "a"}]')
    assert documents(tmp_path / "a.json")[1] == Document("a")


def test_an_array_without_the_field_is_refused_at_its_first_element(tmp_path):
    (tmp_path / "a.json").write_text('[{"instruction": "a", "output": "b"}]')
    with pytest.raises(DataError, match="no field 'text'; it has 'instruction', 'output'"):
        documents(tmp_path / "a.json")
    assert documents(tmp_path / "a.json", prompt="instruction", answer="output") == [Document("b", prompt="a")]


def test_fields_of_objects_in_records_are_named_by_paths(tmp_path):
    lines = [{"m": {"q": "a", "r": {"t": "b"}}}, {"m": None}, {"m": {"q": "c"}}, {"m": 3}, {"m.q": "d", "m.r.t": "e"}]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    docs = documents(tmp_path / "a.jsonl", prompt="m.q", answer="m.r.t")
    assert docs[0] == Document("b", prompt="a") and docs[1] == Document("") and docs[4] == Document("e", prompt="d")
    assert "no field 'm.r.t'" in docs[2].reason and "of type int; expected an object" in docs[3].reason
    table = pa.table({"m": [{"q": "a", "r": {"t": "b"}}, None], "n": ["x", "y"]})
    parquet.write_table(table, tmp_path / "a.parquet")
    feather.write_feather(table, tmp_path / "a.arrow", compression="uncompressed")
    for corpus in (Parquet, Arrow):
        name = str(tmp_path / ("a.parquet" if corpus is Parquet else "a.arrow"))
        assert list(corpus(paths=(name,), prompt="m.q", answer="m.r.t").documents()) == [
            Document("b", prompt="a"),
            Document(""),
        ]
        with pytest.raises(DataError, match=r"no field 'm.x'"):
            list(corpus(paths=(name,), text="m.x").documents())


def test_paths_in_saved_datasets_and_shards(tmp_path):
    import io
    import tarfile

    import datasets

    datasets.Dataset.from_dict({"m": [{"q": "a", "r": {"t": "b"}}]}).save_to_disk(str(tmp_path / "saved"))
    result = list(HuggingFaceDisk(path=str(tmp_path / "saved"), prompt="m.q", answer="m.r.t").documents())
    assert result == [Document("b", prompt="a")]
    with pytest.raises(DataError, match=r"no field 'm\.x'; it has 'm\.q', 'm\.r\.t'"):
        list(HuggingFaceDisk(path=str(tmp_path / "saved"), text="m.x").documents())
    content = json.dumps({"m": {"t": "the oak"}}).encode()
    with tarfile.open(tmp_path / "a.tar", "w") as shard:
        member = tarfile.TarInfo("a.json")
        member.size = len(content)
        shard.addfile(member, io.BytesIO(content))
    assert list(WebDataset(paths=(str(tmp_path / "a.tar"),), text="json.m.t").documents()) == [Document("the oak")]


def test_a_field_that_stands_twice_is_a_bad_record(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"text": "a", "text": "b"}\n{"text": "c", "n": 1, "n": 2}\n')
    bad, good = documents(tmp_path / "a.jsonl")
    assert "field 'text' stands twice" in bad.reason and good == Document("c")


def test_first_bytes_state_what_a_file_is(tmp_path):
    parquet.write_table(pa.table({"text": ["the oak"]}), tmp_path / "table.txt")
    assert isinstance(make_corpus(tmp_path / "table.txt"), Parquet)
    for name in ("lines.json", "LINES.JSONL", "lines.txt", "lines"):
        (tmp_path / name).write_bytes(LINES)
        assert list(make_corpus(tmp_path / name).documents()) == DOCUMENTS, name
    # Code that begins like JSON, and texts that only look like it, are texts.
    for name, text in {"a.py": '{"a": 1}\n', "b.txt": "[link](url) and text", "c.md": '{"a": 1}\n'}.items():
        (tmp_path / name).write_text(text)
        assert isinstance(make_corpus(tmp_path / name), TextFiles), name
    (tmp_path / "settings.json").write_text('{\n  "a": 1\n}\n')
    with pytest.raises(DataError, match="one JSON object over several lines"):
        make_corpus(tmp_path / "settings.json")


def test_a_folder_is_read_by_what_its_files_hold(tmp_path):
    folder = tmp_path / "data"
    folder.mkdir()
    (folder / "a.json").write_bytes(LINES)
    (folder / "B.JSON").write_bytes(LINES)
    assert list(make_corpus(folder).documents()) == DOCUMENTS * 2
    # One that describes the others is left out.
    (folder / "about.json").write_text('{\n  "license": "x"\n}\n')
    corpus = make_corpus(folder)
    assert list(corpus.documents()) == DOCUMENTS * 2
    assert {path.rpartition("/")[2] for path in corpus.paths} == {"a.json", "B.JSON"}
    other = tmp_path / "other"
    other.mkdir()
    (other / "a.jsonl").write_bytes(LINES)
    (other / "b.jsonl.zst").write_bytes(COMPRESS["zst"](LINES))
    (other / "c.json.gz").write_bytes(COMPRESS["gz"](LINES))
    assert list(make_corpus(other).documents()) == DOCUMENTS * 3
    assert isinstance(make_corpus(folder, other / "a.jsonl"), Jsonl | ConcatCorpus)


def test_what_looks_like_records():
    long = b'{"text": "' + b"a" * 2**13
    assert is_json_records(long[: 2**13]) and not is_json_records(b"{" + b"a" * 2**13)
    assert [is_json_records(each) for each in (b"", b" \n", b"[1, 2]", b'[ {"a"', b"{}\n", b'"a"')] == [
        False, False, False, True, True, False,
    ]  # fmt: skip


def test_compressed_data_is_resumed_exactly(tmp_path):
    with zstd.open(tmp_path / "a.jsonl.zst", "wb") as file:
        for number in range(60):
            file.write(json.dumps({"text": f"the oak {number} and the ash " * (1 + number % 5)}).encode() + b"\n")
    data = TextData(
        corpus=Jsonl(paths=(str(tmp_path / "a.jsonl.zst"),)),
        tokenizer=BytePairTokenizer(vocab_size=270),
        sequence_length=32,
        batch_size=4,
        cache_dir=str(tmp_path / "cache"),
    )
    every = [
        (batch["tokens"], position) for (batch, position), _ in zip(data.open().train.batches(), range(9), strict=False)
    ]
    going_on = data.open().train.batches(every[3][1])
    for tokens, position in every[4:]:
        batch, at = next(going_on)
        np.testing.assert_array_equal(batch["tokens"], tokens)
        assert at == position


def test_a_corpus_that_is_replaced_with_its_time_set_back_is_read_again(tmp_path):
    import os

    path = tmp_path / "a.jsonl"

    def tokens(text):
        before = path.stat() if path.exists() else None
        path.write_text(json.dumps({"text": text}) + "\n")
        if before is not None:
            os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
        data = TextData(
            corpus=Jsonl(paths=(str(path),)), tokenizer=BytePairTokenizer(vocab_size=270), sequence_length=8, batch_size=1,
            held_out=0, cache_dir=str(tmp_path / "cache"),
        )  # fmt: skip
        opened = data.open()
        return opened.tokenizer.decode(next(opened.train.batches()).batch["tokens"][0, :3])

    assert tokens("oak").startswith("oak") and tokens("ash").startswith("ash")


@pytest.mark.parametrize("kind", COMPRESS)
def test_shards_may_be_compressed_too(tmp_path, monkeypatch, kind):
    import io
    import tarfile

    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as shard:
        member = tarfile.TarInfo("a.txt")
        member.size = 7
        shard.addfile(member, io.BytesIO(b"the oak"))
    (tmp_path / f"a.tar.{kind}").write_bytes(COMPRESS[kind](out.getvalue()))
    assert [each.text for each in make_corpus(tmp_path).documents()] == ["the oak"]
    monkeypatch.setattr(compressed_files, "UNCHECKED_BYTES", 2**10)
    monkeypatch.setattr(compressed_files, "MAX_RATIO", 2)
    with pytest.raises(DataError, match="expected at most 2 times as many"):
        list(make_corpus(tmp_path / f"a.tar.{kind}").documents())
