"""Each single fault of a disk during a save and a restore: full, read-only, permission lost, input/output errors.

The operating system's calls are replaced, for root is refused nothing; a file system that is really full (by its limit on a
file's size) is in `tests/checkpoint`.
"""

import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from store_faults import CONFIG, go_on, same, save

from panax.checkpoint import Checkpointer
from panax.core import DamagedError, PanaxError
from panax.stores import local
from panax.system import replacement

WRITING = os.O_WRONLY | os.O_RDWR


class FaultyOs:
    """The module `os` as a local store sees it: one call fails on paths that end so, once or for good."""

    def __init__(
        self, call: str, code: int, suffix: str, times: float = float("inf"), flags: int | None = None
    ) -> None:
        self._call, self._code, self._suffix, self._left, self._flags = call, code, suffix, times, flags
        self._names: dict[int, str] = {}
        self.met = 0

    def __getattr__(self, name: str) -> Any:
        real = getattr(os, name)
        if name == "open":
            return self._opened
        return self._failing(real) if name == self._call else real

    def file_opened(self, path: Any, mode: str = "r", **options: Any) -> Any:
        """In place of the built-in `open`, with which files are written that don't pass by the page cache."""
        self._fail_if_due("open", str(path), WRITING if "w" in mode else 0)
        file = open(path, mode, **options)  # noqa: SIM115
        self._names[file.fileno()] = str(path)
        return file

    def _opened(self, path: Any, flags: int, *rest: Any) -> int:
        self._fail_if_due("open", str(path), flags)
        found = os.open(path, flags, *rest)
        self._names[found] = str(path)
        return found

    def _failing(self, real: Callable) -> Callable:
        def replaced(first: Any, *rest: Any, **more: Any) -> Any:
            self._fail_if_due(self._call, self._names.get(first, "") if isinstance(first, int) else str(first), WRITING)
            return real(first, *rest, **more)

        return replaced

    def _fail_if_due(self, call: str, path: str, flags: int) -> None:
        wanted = self._flags is None or bool(flags & WRITING) == bool(self._flags)
        if call == self._call and wanted and self._left > 0 and path.endswith(self._suffix):
            self._left -= 1
            self.met += 1
            raise OSError(self._code, os.strerror(self._code), path)


@pytest.fixture
def faulty(monkeypatch) -> Callable[..., FaultyOs]:
    def put(*args: Any, **options: Any) -> FaultyOs:
        found = FaultyOs(*args, **options)
        for module in (local, replacement):
            monkeypatch.setattr(module, "os", found)
        monkeypatch.setattr(local, "open", found.file_opened, raising=False)
        return found

    return put


def whole(folder: Path) -> list[int]:
    said: list[str] = []
    step, found = go_on(Checkpointer(folder, say=said.append))
    checkpointer = Checkpointer(folder, say=said.append)
    assert same(found, step) and not said, said
    assert all(checkpointer.open(each).verify() == [] for each in checkpointer.steps())
    return checkpointer.steps()


SAVING = {
    "full": ("write", errno.ENOSPC, ".tmp", None),
    "quota": ("write", errno.EDQUOT, ".tmp", None),
    "read-only": ("open", errno.EROFS, ".tmp", WRITING),
    "permission lost": ("open", errno.EACCES, ".tmp", WRITING),
    "error in a write": ("write", errno.EIO, ".tmp", None),
    "error in a flush": ("fsync", errno.EIO, ".tmp", None),
    "error in the flush of the folder": ("fsync", errno.EIO, "step_00000003", None),
}


@pytest.mark.parametrize("stays", [False, True], ids=["once", "stays"])
@pytest.mark.parametrize("kind", list(SAVING))
def test_while_saving(kind, stays, tmp_path, faulty, monkeypatch):
    call, code, suffix, flags = SAVING[kind]
    said: list[str] = []
    checkpointer = Checkpointer(tmp_path, CONFIG, say=said.append)
    for step in (1, 2):
        assert save(checkpointer, step) is None
    fault = faulty(call, code, suffix, times=float("inf") if stays else 1, flags=flags)
    error = save(checkpointer, 3)
    assert fault.met
    monkeypatch.undo()
    assert "retried" in said[0] and os.strerror(code) in said[0], said
    if stays:
        assert "the checkpoint of step 2 is undamaged" in str(error) and os.strerror(code) in str(error), error
        # Of a manifest that is in its place and could not be flushed it is not known whether it lasts: its files are left.
        assert whole(tmp_path) in ([1, 2], [1, 2, 3])
    else:
        assert error is None and whole(tmp_path) == [2, 3]
    assert not list(tmp_path.rglob("*.tmp"))
    assert save(checkpointer, 4) is None
    assert whole(tmp_path)[-1] == 4


def test_a_manifest_that_could_not_be_flushed_keeps_its_files(tmp_path, faulty, monkeypatch):
    """The rename was made, the flush of the folder was not: to remove the files would leave a manifest without them."""
    said: list[str] = []
    checkpointer = Checkpointer(tmp_path, CONFIG, say=said.append)
    assert save(checkpointer, 2) is None
    real = local.flush_folder

    def refused(folder: Path) -> None:
        if (folder / "manifest.json").exists() and folder.name == "step_00000003":
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        real(folder)

    monkeypatch.setattr(local, "flush_folder", refused)
    assert "saving step 3" in str(save(checkpointer, 3))
    assert "step_00000003 may still be committed" in said[-1]
    monkeypatch.undo()
    assert whole(tmp_path) == [2, 3]


READING = {
    "permission lost": ("open", errno.EACCES, 0),
    "input/output error": ("preadv", errno.EIO, None),
}


@pytest.mark.parametrize("suffix", [".bin", "manifest.json"])
@pytest.mark.parametrize("kind", list(READING))
def test_while_restoring(kind, suffix, tmp_path, faulty, monkeypatch):
    """An error that says so, and no older checkpoint in its place: the newest is there, and can't be read now."""
    call, code, flags = READING[kind]
    for step in (1, 2):
        assert save(Checkpointer(tmp_path), step) is None
    fault = faulty(call, code, suffix, flags=flags)
    with pytest.raises(PanaxError, match=rf"{suffix} can't be read: {os.strerror(code)}") as raised:
        go_on(Checkpointer(tmp_path))
    assert fault.met and not isinstance(raised.value, DamagedError)
    monkeypatch.undo()
    assert go_on(Checkpointer(tmp_path))[0] == 2


def test_a_folder_that_can_not_be_listed_is_no_empty_one(tmp_path, faulty):
    assert save(Checkpointer(tmp_path), 1) is None
    checkpointer = Checkpointer(tmp_path)
    fault = faulty("scandir", errno.EACCES, "")
    with pytest.raises(PanaxError, match=r"can't be read: Permission denied"):
        checkpointer.latest()
    assert fault.met


def test_restoring_writes_nothing(tmp_path, faulty):
    """From a read-only file system too."""
    for step in (1, 2):
        assert save(Checkpointer(tmp_path), step) is None
    fault = faulty("open", errno.EROFS, "", flags=WRITING)
    step, found = go_on(Checkpointer(tmp_path))
    assert step == 2 and same(found, 2) and not fault.met
