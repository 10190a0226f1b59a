"""A cache entry appears whole or not at all, is built once by any number of processes, and again when damaged."""

import errno
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from panax.core import DataError
from panax.data.files.cache import cache_directory, read_or_build


def read(entry: Path) -> str:
    text = (entry / "value").read_text() if (entry / "value").exists() else ""
    if not text.endswith("."):
        raise DataError("damaged")
    return text


class Builder:
    def __init__(self, text: str = "done.") -> None:
        self.text, self.count = text, 0

    def __call__(self, entry: Path) -> None:
        self.count += 1
        (entry / "value").write_text(self.text)


def files(root: Path) -> list[str]:
    return sorted(path.name for path in root.iterdir() if not path.name.endswith(".lock"))


def test_an_entry_is_built_once(tmp_path):
    build = Builder()
    assert [read_or_build(tmp_path / "c", "x", build=build, read=read) for _ in range(3)] == ["done."] * 3
    assert build.count == 1 and files(tmp_path / "c") == ["x"]


@pytest.mark.parametrize("damage", ["", "don"])
def test_a_damaged_entry_is_built_again(tmp_path, damage):
    read_or_build(tmp_path, "x", build=Builder(), read=read)
    (tmp_path / "x" / "value").write_text(damage)
    assert read_or_build(tmp_path, "x", build=Builder("again."), read=read) == "again."
    assert files(tmp_path) == ["x"]


def test_a_failed_or_killed_build_leaves_nothing_that_counts(tmp_path):
    def fail(entry: Path) -> None:
        (entry / "value").write_text("half")
        raise DataError("no such corpus")

    with pytest.raises(DataError, match="no such corpus"):
        read_or_build(tmp_path, "x", build=fail, read=read)
    assert files(tmp_path) == []
    (tmp_path / ".x.deadbeef.partial").mkdir()  # what a killed process leaves
    assert read_or_build(tmp_path, "x", build=Builder(), read=read) == "done."
    assert files(tmp_path) == ["x"]


def test_a_builder_that_only_makes_damage_is_an_error(tmp_path):
    with pytest.raises(DataError, match="damaged"):
        read_or_build(tmp_path, "x", build=Builder("no"), read=read)


def test_processes_at_once_build_once(tmp_path):
    code = f"""
import sys, time
from pathlib import Path
from panax.data.files.cache import read_or_build
def build(entry):
    (Path({str(tmp_path)!r}) / f"built-{{time.time_ns()}}").touch()
    time.sleep(0.3)
    (entry / "value").write_text("done.")
print(read_or_build(Path({str(tmp_path / "c")!r}), "x", build=build, read=lambda e: (e / "value").read_text()))
"""
    running = [subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) for _ in range(3)]
    assert [process.communicate()[0] for process in running] == ["done.\n"] * 3
    assert len(list(tmp_path.glob("built-*"))) == 1


@pytest.mark.parametrize("existing", ["", "damaged"])
def test_without_locks_the_first_to_finish_wins(tmp_path, monkeypatch, existing):
    def without_locks(file, **options):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr("panax.data.files.cache.acquire", without_locks)
    if existing:
        (tmp_path / "x").mkdir()
        (tmp_path / "x" / "value").write_text(existing)
    both = threading.Barrier(4)
    results: list[str] = []

    def work(i: int) -> None:
        def build(entry: Path) -> None:
            both.wait()
            time.sleep(0.01 * i)
            (entry / "value").write_text(f"{i}.")

        results.append(read_or_build(tmp_path, "x", build=build, read=read))

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(results) == 4 and set(results) == {read(tmp_path / "x")}
    assert files(tmp_path) == ["x"]


def test_a_cache_that_can_not_be_written_explains_what_to_do(tmp_path):
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(DataError, match=r"can't be written.*name another directory with \$PANAX_CACHE or cache_dir="):
        read_or_build(tmp_path / "file" / "c", "x", build=Builder(), read=read)


def test_an_error_of_the_work_itself_is_not_blamed_on_the_cache(tmp_path):
    with pytest.raises(FileNotFoundError, match="elsewhere"):
        read_or_build(tmp_path, "x", build=lambda entry: Path("/elsewhere/none").write_text("x"), read=read)


def test_where_the_cache_is(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("PANAX_CACHE", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert cache_directory() == tmp_path / ".cache" / "panax"
    monkeypatch.setenv("XDG_CACHE_HOME", "/xdg")
    assert cache_directory() == Path("/xdg/panax")
    monkeypatch.setenv("PANAX_CACHE", "~/mine")
    assert cache_directory() == tmp_path / "mine"
    assert cache_directory("/given") == Path("/given")
