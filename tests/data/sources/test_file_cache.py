"""The cache of remote files: its bound, who is removed, and many threads and processes at once."""

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from panax.core import DataError
from panax.data.files.file_cache import CacheFullError, FileCache
from panax.system.owned_dir import make_owned_dir


def filler(content: bytes, log: list | None = None):
    def fill(descriptor: int) -> None:
        if log is not None:
            log.append(content)
        os.pwrite(descriptor, content, 0)

    return fill


def held(cache: FileCache, key: str, size: int = 10, log: list | None = None):
    return cache.lease(key, size, filler(key[0].encode() * size, log), f"s3://b/{key}")


def names(cache: FileCache) -> set[str]:
    return {path.name for path in cache.root.iterdir() if not path.name.startswith(".")}


def taken(cache: FileCache) -> int:
    return sum(path.stat().st_size for path in cache.root.iterdir() if path.name != ".lock")


@pytest.fixture
def cache(tmp_path) -> FileCache:
    return FileCache(tmp_path / "files", 30, wait_seconds=0.2)


def test_a_file_is_copied_once(cache):
    log = []
    for _ in range(3):
        with held(cache, "a", log=log) as path:
            assert path.read_bytes() == b"a" * 10
    assert len(log) == 1 and names(cache) == {"a"}


def test_what_was_not_used_for_longest_goes_first(cache):
    for key in "abcad":
        with held(cache, key):
            assert taken(cache) <= 30
    assert names(cache) == {"a", "c", "d"}


def test_what_is_in_use_stays(cache):
    with held(cache, "a") as first:
        for key in "bcdef":
            with held(cache, key):
                assert first.read_bytes() == b"a" * 10 and taken(cache) <= 30
        assert "a" in names(cache)
        with held(cache, "g"), held(cache, "h"), pytest.raises(CacheFullError, match="all of its files are in use"):
            held(cache, "i").__enter__()
    with held(cache, "i"):
        pass


def test_a_file_larger_than_the_cache_is_refused(cache):
    with pytest.raises(DataError, match=r"s3://b/a has 31 bytes; the cache of files holds 30: raise PANAX_CACHE_GB"):
        held(cache, "a", 31).__enter__()


def test_what_was_removed_by_hand_no_longer_counts(cache):
    for key in "abc":
        with held(cache, key):
            pass
    (cache.root / "b").unlink()
    with held(cache, "d"):
        assert names(cache) == {"a", "c", "d"}


def test_of_many_copies_some_more_go_so_that_the_next_find_room(tmp_path, monkeypatch):
    monkeypatch.setattr("panax.data.files.file_cache.CROWDED_ENTRIES", 50)
    cache = FileCache(tmp_path / "files", 1000)
    clears = []
    monkeypatch.setattr(FileCache, "_clear", lambda self, size, clear=cache._clear: clears.append(size) or clear(size))
    for number in range(200):
        with held(cache, f"k{number}"):
            assert taken(cache) <= 1000
    assert len(names(cache)) >= 95 and len(clears) < 30


def test_a_copy_that_failed_is_not_there(cache):
    def fail(descriptor: int) -> None:
        os.pwrite(descriptor, b"half", 0)
        raise DataError("the network is gone")

    with pytest.raises(DataError, match="the network is gone"):
        cache.lease("a", 10, fail, "s3://b/a").__enter__()
    assert names(cache) == set() and taken(cache) == 0
    with held(cache, "a") as path:
        assert path.read_bytes() == b"a" * 10


def test_threads_share_a_copy_and_keep_the_bound(cache):
    cache = FileCache(make_owned_dir(cache.root), 45)
    log, worst, stop = [], [0], threading.Event()

    def watch() -> None:
        while not stop.is_set():
            with contextlib.suppress(FileNotFoundError), cache._lock_directory():
                worst[0] = max(worst[0], taken(cache))
            time.sleep(0.001)

    def use(i: int) -> None:
        key = "abcdef"[i * 7 % 6]
        with held(cache, key, log=log) as path:
            assert path.read_bytes() == key.encode() * 10

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        with ThreadPoolExecutor(4) as pool:
            list(pool.map(use, range(120)))
    finally:
        stop.set()
        watcher.join()
    assert 0 < worst[0] <= 45 and len(log) >= 6


USER = """
import os, sys, time
from pathlib import Path
from panax.data.files.file_cache import FileCache
root, number = Path(sys.argv[1]), int(sys.argv[2])
cache = FileCache(root, 35)
for i in range(40):
    key = "abcde"[(i * 3 + number) % 5]
    def fill(descriptor):
        time.sleep(0.002)
        os.pwrite(descriptor, key.encode() * 10, 0)
        with open(root.parent / "made", "a") as log:
            log.write(key)
    with cache.lease(key, 10, fill, key) as path:
        assert path.read_bytes() == key.encode() * 10, key
        assert sum(entry.stat().st_size for entry in (root / name for name in "abcde") if entry.exists()) <= 35
"""


def test_processes_share_copies_and_keep_the_bound(tmp_path):
    users = [
        subprocess.Popen([sys.executable, "-c", USER, str(tmp_path / "files"), str(number)], stderr=subprocess.PIPE)
        for number in range(3)
    ]
    for user in users:
        _, errors = user.communicate(timeout=120)
        assert user.returncode == 0, errors.decode()
    assert taken(FileCache(tmp_path / "files", 35)) <= 35


HANGS = """
import sys, time
from pathlib import Path
from panax.data.files.file_cache import FileCache
def fill(descriptor):
    print("filling", flush=True)
    time.sleep(60)
FileCache(Path(sys.argv[1]), 30).lease("a", 10, fill, "a").__enter__()
"""


def test_a_killed_process_leaves_nothing_that_counts(cache):
    process = subprocess.Popen([sys.executable, "-c", HANGS, str(cache.root)], stdout=subprocess.PIPE)
    assert process.stdout and process.stdout.readline() == b"filling\n"
    assert taken(cache) == 10  # what is under way counts already
    process.send_signal(signal.SIGKILL)
    process.wait(10)
    process.stdout.close()
    with held(cache, "b"), held(cache, "c"), held(cache, "d"):
        assert taken(cache) == 30
    with held(cache, "a") as path:
        assert path.read_bytes() == b"a" * 10


@pytest.mark.parametrize("given", ["0", "-1", "much", "inf", "nan"])
def test_a_limit_that_is_none_is_refused(monkeypatch, given):
    monkeypatch.setenv("PANAX_CACHE_GB", given)
    with pytest.raises(DataError, match=f"PANAX_CACHE_GB={given}; expected a number above 0"):
        FileCache.default()


def test_the_limit_and_the_place_come_from_the_environment(monkeypatch, tmp_path):
    monkeypatch.setenv("PANAX_CACHE", str(tmp_path))
    monkeypatch.delenv("PANAX_CACHE_GB", raising=False)
    assert FileCache.default().limit_bytes == 50_000_000_000
    monkeypatch.setenv("PANAX_CACHE_GB", "0.5")
    cache = FileCache.default()
    assert (cache.root, cache.limit_bytes) == (Path(tmp_path, "panax-files"), 500_000_000)


def test_a_folder_of_somebody_elses_is_not_emptied(tmp_path):
    """$PANAX_CACHE may name a folder that has other things in it, also under the name of the cache's own folder."""
    folder = tmp_path / "files"
    folder.mkdir()
    (folder / "thesis.tex").write_text("mine" * 20)
    cache = FileCache(folder, 30)
    with (
        pytest.raises(DataError, match="contains files and was not created by Panax"),
        cache.lease("a", 20, lambda d: None, "a"),
    ):
        pass
    (folder / "thesis.tex").rename(tmp_path / "thesis.tex")
    with cache.lease("a", 20, lambda descriptor: os.pwrite(descriptor, bytes(20), 0), "a"):
        pass
    (folder / "subfolder").mkdir()
    (folder / "subfolder" / "thesis.tex").write_text("mine")
    with cache.lease("b", 20, lambda descriptor: os.pwrite(descriptor, bytes(20), 0), "b"):
        pass
    assert not (folder / "a").exists() and (folder / "subfolder" / "thesis.tex").read_text() == "mine"
