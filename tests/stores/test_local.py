"""A folder as a store: whole or not at all, whatever happens to the writer or the disk."""

import errno
import fcntl
import json
import mmap
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from panax.core import StoreError
from panax.stores import Entry, LocalStore, ObjectNotFoundError, local
from panax.stores.local import PAGE

SIZE = 2**22


def aligned(size: int, seed: int = 0) -> memoryview:
    """Random bytes that begin on a page."""
    view = memoryview(mmap.mmap(-1, size))
    view[:] = np.random.default_rng(seed).bytes(size)
    return view


@pytest.fixture
def opened_direct(monkeypatch) -> list[bool]:
    """For each file that was opened for writing: whether past the page cache."""
    original, opened_paths = os.open, []

    def spying(path, flags, *rest, **options):
        descriptor = original(path, flags, *rest, **options)
        if flags & os.O_WRONLY:
            opened_paths.append(bool(flags & os.O_DIRECT))
        return descriptor

    monkeypatch.setattr("panax.stores.local.os.open", spying)
    return opened_paths


def takes_direct(folder: Path) -> bool:
    try:
        os.close(os.open(folder / "probe", os.O_WRONLY | os.O_CREAT | os.O_DIRECT))
    except OSError:
        return False
    finally:
        (folder / "probe").unlink(missing_ok=True)
    return True


def test_pages_pass_by_the_cache(tmp_path, opened_direct):
    direct = takes_direct(tmp_path)
    opened_direct.clear()
    store, parts = LocalStore(tmp_path), [aligned(SIZE), aligned(PAGE, 1), aligned(SIZE // 2, 2)]
    store.write("a/x", parts)
    assert opened_direct == ([True] if direct else [])
    assert store.read("a/x") == b"".join(parts)


@pytest.mark.parametrize("parts", [[aligned(SIZE)[1:]], [aligned(SIZE), b"odd"], [aligned(PAGE)], [aligned(SIZE)[:-1]]])
def test_what_is_no_page_or_small_does_not(tmp_path, opened_direct, parts):
    LocalStore(tmp_path).write("a/x", parts)
    assert opened_direct == []
    assert LocalStore(tmp_path).read("a/x") == b"".join(parts)


def test_memory_file_systems_take_pages_too():
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        store, part = LocalStore(folder), aligned(SIZE)
        store.write("x", [part])
        assert store.read("x") == part
        assert [entry.path for entry in store.list()] == ["x"]


def test_a_disk_that_wants_larger_pages_is_written_through_the_cache(tmp_path, monkeypatch):
    original, refused = os.write, []

    def particular(descriptor, view):
        if fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_DIRECT and len(view) != SIZE:
            refused.append(len(view))
            raise OSError(errno.EINVAL, "Invalid argument")
        return original(descriptor, view)

    monkeypatch.setattr("panax.stores.local.os.write", particular)
    parts = [aligned(SIZE), aligned(PAGE, 1)]
    LocalStore(tmp_path).write("x", parts)
    assert LocalStore(tmp_path).read("x") == b"".join(parts)
    assert refused == ([PAGE] if takes_direct(tmp_path) else [])


def test_a_short_write_continues(tmp_path, monkeypatch):
    whole = os.write
    monkeypatch.setattr("panax.stores.local.os.write", lambda descriptor, view: whole(descriptor, view[:1000]))
    bytes_ = np.random.default_rng(0).bytes(12_345)
    LocalStore(tmp_path).write("x", [bytes_[:5000], bytes_[5000:]])
    assert LocalStore(tmp_path).read("x") == bytes_


@pytest.mark.parametrize("direct", [True, False])
@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO, errno.EDQUOT])
def test_a_disk_that_is_full_or_broken_keeps_the_old_object(tmp_path, monkeypatch, code, direct):
    store = LocalStore(tmp_path)
    store.write("a/x", [b"old"])
    original, written = os.write, []

    def filling(descriptor, view):
        if sum(written) >= SIZE // 2:
            raise OSError(code, os.strerror(code))
        written.append(original(descriptor, view[: SIZE // 4]))
        return written[-1]

    monkeypatch.setattr("panax.stores.local.os.write", filling)
    part = aligned(SIZE) if direct else aligned(SIZE + 1)[1:]
    with pytest.raises(StoreError, match=f"a/x can't be written: {os.strerror(code)}; free space there"):
        store.write("a/x", [part])
    assert_only_the_old(store, tmp_path)


def test_a_file_that_may_grow_no_further_keeps_the_old_object(tmp_path):
    """The kernel's own refusal, by a limit on the size of files."""
    store = LocalStore(tmp_path)
    store.write("a/x", [b"old"])
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (SIZE // 2, hard))
        for part in (aligned(SIZE), aligned(SIZE + 1)[1:]):
            with pytest.raises(StoreError, match="a/x can't be written: File too large"):
                store.write("a/x", [part])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, handler)
    assert_only_the_old(store, tmp_path)


def assert_only_the_old(store: LocalStore, root: Path) -> None:
    assert store.read("a/x") == b"old"
    assert [path.name for path in root.rglob("*") if path.is_file()] == ["x"]


def test_a_flush_that_fails_is_an_error(tmp_path, monkeypatch):
    store = LocalStore(tmp_path)
    store.write("a/x", [b"old"])

    def failing(descriptor):
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr("panax.stores.local.os.fsync", failing)
    with pytest.raises(StoreError, match="can't be written: Input/output error"):
        store.write("a/x", [b"new"])
    monkeypatch.undo()
    assert_only_the_old(store, tmp_path)


def test_a_file_that_came_out_shorter_is_an_error(tmp_path, monkeypatch):
    monkeypatch.setattr("panax.stores.local.os.write", lambda descriptor, view: len(view))
    with pytest.raises(StoreError, match="has 0 bytes where 3 were written"):
        LocalStore(tmp_path).write("x", [b"123"])
    assert LocalStore(tmp_path).list() == []


FORBIDDEN = """
import json, os, sys
from panax.core import StoreError
from panax.stores import LocalStore
store = LocalStore(sys.argv[1])
if os.getuid() == 0:  # to whom modes mean nothing
    os.setgid(65534)
    os.setuid(65534)
said = []
for act in (
    lambda: store.write("a/x", [b"new"]), lambda: store.write("new/x", [b"new"]), lambda: store.delete(["a/x"]),
    lambda: store.read("a/closed"), lambda: store.list("shut"), lambda: store.folders("shut"), lambda: store.read("a/x"),
):
    try:
        said.append(repr(act()))
    except StoreError as error:
        said.append(str(error))
print(json.dumps(said))
"""


def test_lost_permission_and_read_only_folders_are_reported():
    root = Path(tempfile.mkdtemp())
    try:
        store = LocalStore(root)
        for path in ("a/x", "a/closed", "shut/y"):
            store.write(path, [b"old"])
        (root / "a/closed").chmod(0o000)
        (root / "shut").chmod(0o000)
        (root / "a").chmod(0o555)
        root.chmod(0o555)
        out = subprocess.run(
            [sys.executable, "-c", FORBIDDEN, root], capture_output=True, text=True, check=True, timeout=60
        )
        said = json.loads(out.stdout)
        denied = ["a/x can't be written", "new/x can't be written", "a/x can't be removed", "a/closed can't be read"]
        for text, expected in zip(said, [*denied, "shut can't be read", "shut can't be read"]):
            assert f"{root}/{expected}: Permission denied; " in text
        assert said[-1] == repr(b"old")
    finally:
        for folder in (root, root / "a", root / "shut"):
            folder.chmod(0o755)
        shutil.rmtree(root)


def test_a_read_only_file_system_is_reported(tmp_path, monkeypatch):
    store = LocalStore(tmp_path)
    store.write("a/x", [b"old"])

    def refusing(*_: object, **__: object):
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr("panax.stores.local.open", refusing, raising=False)
    monkeypatch.setattr("panax.stores.local.Path.unlink", refusing)
    for act in (lambda: store.write("a/x", [b"new"]), lambda: store.delete(["a/x"]), lambda: store.sweep()):
        if act.__code__.co_names[-1] == "sweep":
            Path(tmp_path, "a", f".{1:032x}.tmp").write_bytes(b"")
        with pytest.raises(StoreError, match="Read-only file system"):
            act()
    monkeypatch.undo()
    assert store.read("a/x") == b"old"


KILLED = """
import mmap, sys
from panax.stores import LocalStore
store, size = LocalStore(sys.argv[1]), int(sys.argv[2])
versions = []
for value in (1, 2):
    part = memoryview(mmap.mmap(-1, size))
    part[:] = bytes([value]) * size
    versions.append(part)
print("ready", flush=True)
while True:
    for part in versions:
        store.write("a/x", [part])
"""


def test_a_writer_killed_at_any_moment_leaves_a_whole_object(tmp_path):
    """Half of the kills are at random moments, half when a file that is being written is seen; three must hit a write."""
    store, size, draw, kills, hits = LocalStore(tmp_path), 2**24, random.Random(0), 0, 0
    store.write("a/x", [bytes(size)])
    while kills < 6 or hits < 3:
        assert kills < 60, f"of {kills} kills {hits} fell into a write"
        writer = subprocess.Popen([sys.executable, "-c", KILLED, tmp_path, str(size)], stdout=subprocess.PIPE)
        assert writer.stdout and writer.stdout.readline() == b"ready\n"
        time.sleep(draw.uniform(0.0, 0.1))
        if kills % 2:
            deadline = time.monotonic() + 20
            while not any(tmp_path.rglob("*.tmp")) and time.monotonic() < deadline:
                pass
        writer.kill()
        writer.wait()
        writer.stdout.close()
        assert store.list() == [Entry("a/x", size)]
        opened_paths = store.read("a/x")
        assert opened_paths in (bytes(size), b"\1" * size, b"\2" * size)
        kills, hits = kills + 1, hits + any(tmp_path.rglob("*.tmp"))
        store.sweep()
        assert [path.name for path in tmp_path.rglob("*") if path.is_file()] == ["x"]


def test_a_folder_that_goes_while_it_is_written_to_is_made_again(tmp_path, monkeypatch):
    store, original, turns = LocalStore(tmp_path), Path.rename, []

    def late(path, target):
        if not turns:
            turns.append(1)
            shutil.rmtree(tmp_path / "a")
        return original(path, target)

    monkeypatch.setattr("panax.stores.local.Path.rename", late)
    store.write("a/x", [b"new"])
    assert store.read("a/x") == b"new"


def test_a_file_cut_short_is_reported_with_its_byte_range(tmp_path):
    store = LocalStore(tmp_path)
    store.write("a/x", [bytes(10_000)])
    os.truncate(tmp_path / "a/x", 6000)
    with pytest.raises(StoreError, match=r"a/x ends at byte 6000; expected 100 to 10000: it is cut short") as caught:
        store.read_into("a/x", 100, memoryview(bytearray(9900)))
    assert not isinstance(caught.value, ObjectNotFoundError)


def test_what_looks_like_a_temporary_name_but_is_none_is_kept(tmp_path):
    store = LocalStore(tmp_path)
    store.write("notes.tmp", [b"1"])
    store.sweep()
    assert store.list() == [Entry("notes.tmp", 1)]
    assert LocalStore(tmp_path / "nowhere").sweep() is None


def test_folders_that_a_killed_writer_made_and_did_not_fill_are_swept(tmp_path):
    """A process is killed between making an attempt's folder and its first file."""
    store = LocalStore(tmp_path)
    store.write("step_1/b/x", [b"1"])
    for empty in ("step_1/a", "step_2/a", "other/a"):
        (tmp_path / empty).mkdir(parents=True)
    store.sweep(["step_1", "step_2"])
    assert sorted(store.folders()) == ["other", "step_1"] and store.folders("step_1") == ["b"]
    assert (tmp_path / "other/a").is_dir() and store.list() == [Entry("step_1/b/x", 1)]


def test_a_name_as_long_as_the_disk_takes(tmp_path):
    LocalStore(tmp_path).write("n" * 255, [b"1"])
    assert LocalStore(tmp_path).list() == [Entry("n" * 255, 1)]
    with pytest.raises(StoreError, match="name too long"):
        LocalStore(tmp_path).write("n" * 256, [b"1"])


def test_a_file_that_is_written_for_long_shows_signs_of_life(tmp_path, monkeypatch):
    moved = []
    monkeypatch.setattr(local, "heartbeat", lambda: SimpleNamespace(report_progress=moved.append))
    monkeypatch.setattr(local, "_WRITE_BYTES", 1000)
    LocalStore(tmp_path).write("a/b", [b"x" * 2500, b"y" * 900])
    assert moved == ["save"] * 4 and (tmp_path / "a/b").stat().st_size == 3400
