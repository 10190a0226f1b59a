"""Formats of other programs: files that those wrote give the documents they were made of; damage is named."""

import dataclasses
import gzip
import io
import json
import re
import shutil
import sys
import tarfile
from pathlib import Path

import numpy as np
import pytest

from panax.core import DataError, RecipeError
from panax.core.install_hints import install_command
from panax.data import BadRecord, Corpus, Document, TextData
from panax.data.formats.array_record import ArrayRecord
from panax.data.formats.arrow import Arrow
from panax.data.formats.mds import Mds, decode
from panax.data.formats.megatron import MegatronTokens, read_index
from panax.data.formats.webdataset import WebDataset

FIXTURES = Path(__file__).with_name("fixtures")
RECORDS = [{"text": f"text {i} über", "q": f"q{i}", "a": f"a{i}", "other": i} for i in range(5)]


def write_arrow(path: Path, *, stream: bool = False, compression: str | None = None, rows: int = 2) -> str:
    import pyarrow
    from pyarrow import ipc

    table = pyarrow.Table.from_pylist(RECORDS)
    options = ipc.IpcWriteOptions(compression=compression)
    new = ipc.new_stream if stream else ipc.new_file
    with new(str(path), table.schema, options=options) as writer:
        writer.write_table(table, max_chunksize=rows)
    return str(path)


def write_array_record(path: Path, records: list[bytes]) -> str:
    from array_record.python.array_record_module import ArrayRecordWriter

    writer = ArrayRecordWriter(str(path), "group_size:2")
    for record in records:
        writer.write(record)
    writer.close()
    return str(path)


def write_tar(path: Path, files: dict[str, bytes]) -> str:
    with tarfile.open(path, "w") as shard:
        for name, content in files.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            shard.addfile(member, io.BytesIO(content))
    return str(path)


@pytest.fixture(params=["file", "stream", "zstd", "lz4"])
def arrow_file(request, tmp_path) -> str:
    compression = request.param if request.param in ("zstd", "lz4") else None
    return write_arrow(tmp_path / "a.arrow", stream=request.param == "stream", compression=compression)


def test_arrow_files_and_streams(arrow_file):
    corpus = Arrow(paths=(arrow_file,))
    assert isinstance(corpus, Corpus)
    documents = list(corpus.documents())
    assert documents == [Document(record["text"]) for record in RECORDS]
    assert documents[3].where == f"{arrow_file}, row 3"
    pairs = Arrow(paths=(arrow_file,), prompt="q", answer="a").documents()
    assert list(pairs) == [Document(f"a{i}", prompt=f"q{i}") for i in range(5)]
    first, *_ = Arrow(paths=(arrow_file,), text="other").documents()
    assert isinstance(first, BadRecord) and first.reason.startswith("field 'other' is of type int")
    with pytest.raises(DataError, match=r"a\.arrow: no field 'body'; it has 'text', 'q', 'a', 'other'"):
        list(Arrow(paths=(arrow_file,), text="body").documents())


@pytest.mark.parametrize("content", [b"junk" * 30, b"ARROW1\0\0junk", b""])
def test_a_file_that_is_no_arrow_is_named(tmp_path, content):
    (tmp_path / "a.arrow").write_bytes(content)
    with pytest.raises(DataError, match=r"a\.arrow can't be read"):
        list(Arrow(paths=(str(tmp_path),)).documents())


def test_an_arrow_file_cut_short_is_named(tmp_path):
    path = Path(write_arrow(tmp_path / "a.arrow", stream=True))
    path.write_bytes(path.read_bytes()[:-200])
    with pytest.raises(DataError, match=r"a\.arrow can't be read"):
        list(Arrow(paths=(str(path),)).documents())


def test_array_records_of_text_and_of_json(tmp_path):
    path = write_array_record(tmp_path / "a.array_record", [b"one", "zwei über".encode(), b"\xe9", b"four"])
    *good, bad, last = ArrayRecord(paths=(str(tmp_path),)).documents()
    assert [*good, last] == [Document("one"), Document("zwei über"), Document("four")]
    assert isinstance(bad, BadRecord) and bad.where == f"{path}, record 2" and "0xe9" in bad.reason
    lines = [json.dumps(record).encode() for record in RECORDS]
    path = write_array_record(tmp_path / "b.array_record", [*lines, b"{"])
    *documents, bad = ArrayRecord(paths=(path,), record="json", prompt="q", answer="a").documents()
    assert documents == [Document(f"a{i}", prompt=f"q{i}") for i in range(5)]
    assert isinstance(bad, BadRecord) and bad.reason.startswith("broken JSON")
    assert ArrayRecord(paths=(path,)).fingerprint() != ArrayRecord(paths=(path,), record="json").fingerprint()
    with pytest.raises(RecipeError, match="have no effect with record="):
        ArrayRecord(paths=(path,), text="body")


@pytest.mark.parametrize("damage", [lambda data: data[:-70], lambda data: b"junk" * 99, lambda data: b""])
def test_a_damaged_array_record_file_is_named(tmp_path, damage):
    path = Path(write_array_record(tmp_path / "a.array_record", [b"one"]))
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(DataError, match=r"a\.array_record is not an ArrayRecord file, or is cut short"):
        list(ArrayRecord(paths=(str(path),)).documents())


@pytest.mark.parametrize("module", ["pyarrow", "array_record.python.array_record_module"])
def test_a_missing_package_explains_what_to_install(tmp_path, monkeypatch, module):
    paths = (str(tmp_path / "a"),)
    (tmp_path / "a").write_bytes(b"x")
    monkeypatch.setitem(sys.modules, module, None)
    corpus, extra = (Arrow, "parquet") if module == "pyarrow" else (ArrayRecord, "arrayrecord")
    with pytest.raises(DataError, match=re.escape(install_command(extra))):
        list(corpus(paths=paths).documents())


@pytest.mark.parametrize("name", ["mds_plain", "mds_zstd"])
def test_mds_shards_of_their_own_writer(name):
    corpus = Mds(path=str(FIXTURES / name))
    documents = list(corpus.documents())
    assert documents == [Document(f"text {i} über") for i in range(6)]
    assert documents[2].where.startswith(f"{FIXTURES / name}/shard.00001.mds") and documents[2].where.endswith(
        "sample 0"
    )
    first, *_ = Mds(path=str(FIXTURES / name), text="label").documents()
    assert isinstance(first, BadRecord) and first.reason.startswith("field 'label' is of type int")
    with pytest.raises(DataError, match=r"no field 'body'; it has 'big', 'extra'"):
        list(dataclasses.replace(corpus, text="body").documents())


def test_every_encoding_of_mds_gives_what_was_written():
    shards = Mds(path=str(FIXTURES / "mds_plain"))._shards()
    names = list(shards[0].columns)
    samples = [sample for shard in shards for sample in shard.samples(Path(shard.file.name).read_bytes(), names)]
    for i, sample in enumerate(samples):
        assert isinstance(sample, dict)
        arrays = {name: sample.pop(name) for name in ("vector", "fixed", "typed")}
        assert sample == {
            "text": f"text {i} über", "label": i - 3, "raw": bytes([i, 255]), "small": i, "score": i / 4,
            "extra": {"a": [i]}, "big": 10**20 + i,
        }  # fmt: skip
        assert arrays["vector"].tolist() == list(range(i + 1)) and arrays["vector"].dtype == np.int64
        assert arrays["fixed"].tolist() == [[i] * 3] * 2 and arrays["fixed"].dtype == np.int16
        assert arrays["typed"].tolist() == [[float(i)] * (i + 1)] * 2 and arrays["typed"].dtype == np.float32
    assert len(samples) == 6 and decode("float64", np.float64(0.1).tobytes()) == 0.1


def test_pickled_columns_are_refused():
    with pytest.raises(RecipeError, match=r"column 'any' holds pickled values, which are never loaded"):
        list(Mds(path=str(FIXTURES / "mds_pickle"), text="any").documents())
    assert list(Mds(path=str(FIXTURES / "mds_pickle")).documents()) == [Document("a")]


def test_damaged_mds_shards_are_named(tmp_path):
    plain, zstd = tmp_path / "plain", tmp_path / "zstd"
    shutil.copytree(FIXTURES / "mds_plain", plain)
    shutil.copytree(FIXTURES / "mds_zstd", zstd)
    shard = zstd / "shard.00001.mds.zstd"
    shard.write_bytes(shard.read_bytes()[:-1] + b"?")
    with pytest.raises(DataError, match=r"shard\.00001\.mds\.zstd is damaged: its sha1 is not the one in index\.json"):
        list(Mds(path=str(zstd)).documents())
    shard = plain / "shard.00002.mds"
    shard.write_bytes(shard.read_bytes()[:-1])
    with pytest.raises(DataError, match=r"shard\.00002\.mds has 566 bytes; index\.json states 567"):
        list(Mds(path=str(plain)).documents())
    shard.unlink()
    with pytest.raises(DataError, match=r"shard\.00002\.mds does not exist|lacks shard\.00002"):
        list(Mds(path=str(plain)).documents())
    (plain / "index.json").write_text("[]")
    with pytest.raises(DataError, match=r"index\.json is not an index of MDS shards"):
        Mds(path=str(plain)).fingerprint()
    index = json.loads((zstd / "index.json").read_text())
    index["shards"][0]["zip_data"]["basename"] = "../../etc/passwd"
    (zstd / "index.json").write_text(json.dumps(index))
    with pytest.raises(DataError, match=r"names the shard '\.\./\.\./etc/passwd'"):
        Mds(path=str(zstd)).fingerprint()


def test_webdataset_shards_of_their_own_writer():
    shard = str(FIXTURES / "text.tar.gz")
    documents = list(WebDataset(paths=(shard,)).documents())
    assert documents == [Document(f"text {i} über") for i in range(4)]
    assert documents[1].where == f"{shard}, dir/s1"
    pairs = WebDataset(paths=(shard,), prompt="json.question", answer="json.answer").documents()
    assert list(pairs) == [Document(f"a{i}", prompt=f"q{i}") for i in range(4)]


def test_samples_that_lack_a_file_or_are_broken_are_bad_records(tmp_path):
    files = {"a.txt": b"A", "b.jpg": b"", "sub/c.txt": b"\xe9", "sub/c.json": b"{", "README": b"x", "d.TXT": b"D"}
    path = write_tar(tmp_path / "a.tar", files)
    first, lacks, wrong, last = WebDataset(paths=(path,)).documents()
    assert (first, last) == (Document("A"), Document("D"))
    assert lacks == (f"{path}, b", "no file 'txt'; the sample has 'jpg': name one of them")
    assert isinstance(wrong, BadRecord) and wrong.where == f"{path}, sub/c.txt" and "0xe9" in wrong.reason
    broken = list(WebDataset(paths=(path,), text="json.body").documents())[2]
    assert isinstance(broken, BadRecord) and broken.reason.startswith("broken JSON")


def test_a_shard_cut_short_is_named(tmp_path):
    path = Path(write_tar(tmp_path / "a.tar", {"a.txt": b"A" * 2000}))
    path.write_bytes(path.read_bytes()[:1500])
    with pytest.raises(DataError, match=r"a\.tar can't be read"):
        list(WebDataset(paths=(str(path),)).documents())
    path.write_bytes(gzip.compress(b"no tar"))
    with pytest.raises(DataError, match=r"a\.tar can't be read"):
        list(WebDataset(paths=(str(path),)).documents())


@pytest.mark.parametrize("kind", ["u16", "i32"])
def test_tokens_of_megatron_are_mapped_as_they_are(tmp_path, kind):
    corpus = MegatronTokens(path=str(FIXTURES / f"megatron_{kind}"), end_of_document=9)
    for _ in range(2):  # built, then from the cache
        store = corpus.open(tmp_path)
        assert store.tokens.tolist() == [1, 2, 3, 9, 4, 5, 6, 9, 7, 9]
        assert store.offsets.tolist() == [0, 4, 8, 10]
        assert isinstance(store.tokens.base, np.memmap) and store.tokens.itemsize == (2 if kind == "u16" else 4)
    assert (store.vocab_size, store.end_of_document) == (10, 9)
    assert store.target_counts.tolist() == [0, 0, 1, 1, 0, 1, 1, 0, 0, 3]
    assert not list(tmp_path.glob("*/tokens.bin"))
    for path in (f"megatron_{kind}.bin", f"megatron_{kind}.idx"):
        assert dataclasses.replace(corpus, path=str(FIXTURES / path)).fingerprint() == corpus.fingerprint()


@pytest.mark.parametrize(("code", "dtype"), [(1, np.uint8), (2, np.int8), (3, np.int16), (5, np.int64)])
def test_tokens_of_megatron_of_rarer_dtypes(tmp_path, code, dtype):
    index = bytearray((FIXTURES / "megatron_u16.idx").read_bytes())
    starts = np.frombuffer(index, "<i8", 4, 34 + 16)
    edited(index, 34 + 16, (starts // 2 * dtype().itemsize).tobytes())
    (tmp_path / "a.idx").write_bytes(bytes(edited(index, 17, bytes([code]))))
    np.array([1, 2, 3, 9, 4, 5, 6, 9, 7, 9], dtype).tofile(tmp_path / "a.bin")
    store = MegatronTokens(path=str(tmp_path / "a")).open(tmp_path / "cache")
    assert store.tokens.tolist() == [1, 2, 3, 9, 4, 5, 6, 9, 7, 9] and store.tokens.itemsize == dtype().itemsize
    if dtype is not np.uint8:
        np.array([1, 2, -3, 9, 4, 5, 6, 9, 7, 9], dtype).tofile(tmp_path / "a.bin")
        with pytest.raises(DataError, match=r"a\.bin: token 2 is negative; expected ids"):
            MegatronTokens(path=str(tmp_path / "a")).open(tmp_path / "cache")


def test_training_on_tokens_of_megatron(tmp_path):
    tokens = MegatronTokens(path=str(FIXTURES / "megatron_i32"))
    data = TextData(corpus=tokens, tokenizer=None, sequence_length=4, batch_size=2, held_out=0, cache_dir=str(tmp_path))
    batch = next(data.open().train.batches()).batch
    assert batch["tokens"].shape == (2, 4) and batch["tokens"].dtype == np.int32


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"end_of_document": 8}, "document 0 ends with id 9, not with end_of_document=8"),
        ({"vocab_size": 9}, "id 9 at token 3; vocab_size=9"),
        ({"path": str(FIXTURES / "megatron_modes")}, "is multi-modal: it gives each sequence a mode"),
        ({"path": str(FIXTURES / "nowhere")}, r"nowhere\.bin does not exist; expected .*nowhere\.bin and .*\.idx"),
    ],
)
def test_settings_that_do_not_fit_the_tokens_of_megatron(tmp_path, settings, says):
    with pytest.raises(DataError, match=says):
        MegatronTokens(**({"path": str(FIXTURES / "megatron_u16")} | settings)).open(tmp_path)


def edited(index: bytearray, at: int, value: bytes) -> bytearray:
    index[at : at + len(value)] = value
    return index


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (lambda index: index[:20], "is not an index of Megatron"),
        (lambda index: index[:-8], r"has \d+ bytes; expected \d+ for 4 sequences"),
        (lambda index: edited(index, 0, b"TNTIDX"), "of the older kind"),
        (lambda index: edited(index, 9, b"\2"), "has version 2; expected 1"),
        (lambda index: edited(index, 17, b"\7"), "has the dtype code 7; expected one of integers"),
        (lambda index: edited(index, 18, b"\xff" * 7), "damaged or cut short"),
        (lambda index: edited(index, 34, b"\5"), "do not follow one another"),
        (lambda index: edited(index, len(index) - 8, b"\3"), "documents do not rise from 0 to 4"),
        (lambda index: b"", "can't be read"),
    ],
)
def test_a_damaged_index_of_megatron_is_named(tmp_path, damage, says):
    path = tmp_path / "a.idx"
    path.write_bytes(bytes(damage(bytearray((FIXTURES / "megatron_u16.idx").read_bytes()))))
    with pytest.raises(DataError, match=says):
        read_index(path, "a.idx")


def test_tokens_of_another_length_than_the_index_states_are_refused(tmp_path):
    for suffix in (".bin", ".idx"):
        shutil.copy(FIXTURES / f"megatron_u16{suffix}", tmp_path / f"a{suffix}")
    with (tmp_path / "a.bin").open("ab") as file:
        file.write(b"\0\0")
    with pytest.raises(DataError, match=r"a\.bin has 22 bytes; its index states 20"):
        MegatronTokens(path=str(tmp_path / "a")).open(tmp_path / "cache")
