"""Corpora in object stores: what an address means, copies in the bounded cache, faults, and what errors name."""

import contextlib
import gc
import gzip
import json
import threading
import time
from pathlib import Path

import pytest
from servers.faults import Fault

from panax.core import DataError, StoreError
from panax.data import Document, Jsonl, Parquet, TextFiles
from panax.data.files.file_cache import CacheFullError, FileCache
from panax.data.files.files import find_files, open_each_local
from panax.data.files.remote import PART_BYTES, find_objects
from panax.data.formats.arrow import Arrow
from panax.data.formats.mds import Mds
from panax.data.formats.megatron import MegatronTokens
from panax.data.formats.webdataset import WebDataset
from panax.data.text.record_checks import UsableDocuments
from panax.stores import open_store

FIXTURES = Path(__file__).with_name("fixtures")


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch) -> Path:
    monkeypatch.setenv("PANAX_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "panax-files"


def lines(*texts: str) -> bytes:
    return "".join(json.dumps({"text": text}) + "\n" for text in texts).encode()


@pytest.fixture
def folder() -> str:
    """A folder of a store in memory."""
    store = open_store("memory://sources/corpus")
    store.delete([entry.path for entry in store.list()])
    files = {
        "b.jsonl": lines("B"),
        "a/z.jsonl.gz": gzip.compress(lines("AZ")),
        "a.jsonl": lines("A"),
        ".hidden/h.jsonl": lines("H"),
        "c.txt": b"C",
    }
    for path, content in files.items():
        store.write(path, [content])
    return "memory://sources/corpus"


def texts(*paths: str) -> list[str]:
    return [document.text for document in Jsonl(paths=paths).documents() if isinstance(document, Document)]


def test_addresses_name_objects_folders_and_globs(folder):
    assert texts(folder) == ["AZ", "A", "B"]  # by the parts of their names, as on a disk
    assert texts(f"{folder}/") == ["AZ", "A", "B"]
    assert texts(f"{folder}/b.jsonl", folder) == ["B", "AZ", "A"]
    assert texts(f"{folder}/*.jsonl") == ["A", "B"]
    assert texts(f"{folder}/**/*.jsonl*") == ["AZ", "A", "B"]
    assert texts(f"{folder}/[!b]*.jsonl", f"{folder}/?/z.jsonl.gz") == ["A", "AZ"]
    assert [document.text for document in TextFiles(paths=(f"{folder}/c.txt",)).documents()] == ["C"]


@pytest.mark.parametrize(
    ("address", "says"),
    [
        ("memory://sources/nowhere", "memory://sources/nowhere does not exist; expected an object, a folder"),
        ("memory://sources/corpus/x*.jsonl", r"x\*\.jsonl matches nothing; expected a glob"),
        ("memory://*/a", "names no bucket"),
    ],
)
def test_addresses_that_name_nothing(folder, address, says):
    with pytest.raises(DataError, match=says):
        texts(address)
    with pytest.raises(DataError, match=r"no object in memory://sources/corpus matches \*\*/\*\.parquet"):
        list(Parquet(paths=(folder,)).documents())


def test_records_name_the_address(folder):
    open_store(folder).write("b.jsonl", [lines("B") + b"{"])
    with pytest.raises(DataError, match=r"^memory://sources/corpus/b\.jsonl, line 2: broken JSON"):
        list(UsableDocuments(Jsonl(paths=(folder,))).documents())
    open_store(folder).write("a/z.jsonl.gz", [gzip.compress(lines("AZ"))[:-9]])
    with pytest.raises(DataError, match=r"^memory://sources/corpus/a/z\.jsonl\.gz can't be read"):
        list(Jsonl(paths=(folder,)).documents())


def test_a_changed_object_changes_the_fingerprint_and_is_read_again(folder):
    corpus = Jsonl(paths=(folder,))
    before = corpus.fingerprint()
    assert before == corpus.fingerprint() and texts(folder)[1] == "A"
    open_store(folder).write("a.jsonl", [lines("X")])  # of the same size
    assert corpus.fingerprint() != before and texts(folder)[1] == "X"


def test_an_object_that_is_replaced_meanwhile_is_refused(folder):
    (file,) = find_files((f"{folder}/a.jsonl",), ())
    open_store(folder).write("a.jsonl", [lines("Y")])
    with (
        pytest.raises(DataError, match=r"a\.jsonl was replaced while it was read; run the same again"),
        file.open_local(),
    ):
        pass


def test_every_format_is_read_from_a_store(tmp_path):
    store = open_store("memory://formats")
    import pyarrow
    from pyarrow import ipc, parquet

    table = pyarrow.table({"text": [f"text {i} über" for i in range(4)]})
    parquet.write_table(table, tmp_path / "a.parquet", row_group_size=1)
    with ipc.new_file(str(tmp_path / "a.arrow"), table.schema) as writer:
        writer.write_table(table)
    made = {path.name: path for path in (tmp_path / "a.parquet", tmp_path / "a.arrow", FIXTURES / "text.tar.gz")}
    made |= {f"mds/{path.name}": path for path in (FIXTURES / "mds_zstd").iterdir()}
    made |= {path.name: path for path in FIXTURES.glob("megatron_u16.*")}
    for name, path in made.items():
        store.write(name, [path.read_bytes()])
    for corpus in (
        Parquet(paths=("memory://formats",)),
        Arrow(paths=("memory://formats/*.arrow",)),
        WebDataset(paths=("memory://formats",)),
        Mds(path="memory://formats/mds"),
    ):
        assert [document.text for document in UsableDocuments(corpus).documents()][:4] == [
            f"text {i} über" for i in range(4)
        ]
        assert corpus.fingerprint() == corpus.fingerprint()
    tokens = MegatronTokens(path="memory://formats/megatron_u16").open(tmp_path / "tokens")
    assert tokens.tokens.tolist() == [1, 2, 3, 9, 4, 5, 6, 9, 7, 9]


def bytes_in(cache: Path) -> int:
    """Of all copies; one that found no room is removed at any time."""
    total = 0
    for path in cache.iterdir():
        with contextlib.suppress(FileNotFoundError):
            total += path.stat().st_size if path.name != ".lock" else 0
    return total


def test_the_bound_holds_while_a_corpus_larger_than_it_is_read(folder, cache, monkeypatch):
    store = open_store(folder)
    for number in range(8):
        store.write(f"many/{number}.jsonl", [lines(f"{number}" * 200)])
    size = len(lines("0" * 200))
    monkeypatch.setenv("PANAX_CACHE_GB", str(2.5 * size / 1e9))
    worst = 0
    for number, document in enumerate(Jsonl(paths=(f"{folder}/many",)).documents()):
        assert isinstance(document, Document) and document.text == f"{number}" * 200
        with FileCache.default()._lock_directory():
            worst = max(worst, bytes_in(cache))
    assert number == 7 and size <= worst <= 2.5 * size
    # Where there is room for one alone, nothing is copied ahead.
    monkeypatch.setenv("PANAX_CACHE_GB", str(1.5 * size / 1e9))
    assert len(list(Jsonl(paths=(f"{folder}/many",)).documents())) == 8
    monkeypatch.setenv("PANAX_CACHE_GB", str(0.5 * size / 1e9))
    with pytest.raises(DataError, match=r"many/0\.jsonl has 213 bytes; the cache of files holds 106"):
        list(Jsonl(paths=(f"{folder}/many",)).documents())


def test_what_was_copied_ahead_makes_room_for_what_comes_first(folder, monkeypatch):
    sizes = (300, 800, 400)  # the second does not fit beside either of the others
    for number, size in enumerate(sizes):
        open_store(folder).write(f"some/{number}.txt", [b"x" * size])
    monkeypatch.setenv("PANAX_CACHE_GB", str(1000 / 1e9))
    monkeypatch.setattr("panax.data.files.file_cache._WAIT_SECONDS", 1.0)
    lengths = []
    for name, path in open_each_local(find_files((f"{folder}/some",), ("*",))):
        time.sleep(0.1)  # until the others were tried
        lengths.append(path.stat().st_size)
        assert name == f"{folder}/some/{len(lengths) - 1}.txt"
    assert lengths == [*sizes]


def test_a_reader_that_stops_early_lets_go(folder, cache):
    documents = Jsonl(paths=(folder,)).documents()
    next(documents)
    documents.close()
    for thread in threading.enumerate():
        if thread.name.startswith("ThreadPoolExecutor"):
            thread.join(5)
    small = FileCache(cache, 100)
    with small.lease("big", 100, lambda descriptor: None, "big"):
        assert [path.name for path in cache.iterdir() if not path.name.startswith(".")] == ["big"]


def test_mapped_tokens_of_a_store_stay_as_long_as_they_are_in_use(tmp_path, cache, monkeypatch):
    for path in FIXTURES.glob("megatron_i32.*"):
        open_store("memory://mapped").write(path.name, [path.read_bytes()])
    tokens = MegatronTokens(path="memory://mapped/megatron_i32").open(tmp_path / "tokens")
    full = FileCache(cache, 160, wait_seconds=0.0)  # the two files take 154 bytes
    with pytest.raises(CacheFullError), full.lease("other", 100, lambda descriptor: None, "other"):
        pass
    assert tokens.tokens[:4].tolist() == [1, 2, 3, 9]
    del tokens
    gc.collect()
    with full.lease("other", 100, lambda descriptor: None, "other"):
        pass


def test_a_corpus_on_s3_is_read_once_and_then_from_the_cache(bucket, s3_server, proxy):
    for number in range(3):
        s3_server.put(f"{bucket.removeprefix('s3://')}/texts/{number}.jsonl", lines(f"text {number}"))
    assert texts(f"{bucket}/texts/*.jsonl") == ["text 0", "text 1", "text 2"]
    proxy.faults.forget()
    assert texts(f"{bucket}/texts") == ["text 0", "text 1", "text 2"]
    seen = proxy.faults.counts
    assert seen.requests == {"GET": 1} and not any("jsonl" in path for path in seen.bytes_read)
    with pytest.raises(DataError, match=rf"{bucket}/other does not exist"):
        texts(f"{bucket}/other")


def test_faults_of_s3_are_tried_again_and_flipped_bits_found(bucket, s3_server, proxy, cache):
    key = f"{bucket.removeprefix('s3://')}/texts/a.jsonl"
    s3_server.put(key, lines(*(f"text {i}" for i in range(2000))))
    kinds = ("503", "cut", "reset", "flip_read")
    rules = (Fault(kind=kind, method="GET", path="a.jsonl$", first=1 + i) for i, kind in enumerate(kinds))
    proxy.faults.set(*rules)
    assert texts(f"{bucket}/texts") == [f"text {i}" for i in range(2000)]
    assert proxy.faults.counts.faults == dict.fromkeys(kinds, 1)


def test_what_can_not_be_read_is_an_error_and_leaves_nothing(bucket, s3_server, proxy, cache):
    s3_server.put(f"{bucket.removeprefix('s3://')}/texts/a.jsonl", lines("A"))
    proxy.faults.set(Fault(kind="403", method="GET", path="a.jsonl$", times=None))
    with pytest.raises(StoreError, match=rf"{bucket}/texts/a\.jsonl can't be read: .*403"):
        texts(f"{bucket}/texts")
    assert sorted(path.name for path in cache.iterdir()) == [".lock", ".made-by-panax"]


def test_a_large_object_is_copied_in_parts(tmp_path):
    content = bytes(range(256)) * ((PART_BYTES * 2) // 256) + b"end"
    open_store("memory://large").write("a.txt", [content])
    (found,) = find_objects("memory://large/a.txt", ())
    with found.open_local() as path:
        assert path.read_bytes() == content
