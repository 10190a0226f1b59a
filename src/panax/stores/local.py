"""A folder of this machine or of a shared file system as a store.

An object is written under another name, flushed to the disk, and renamed: it exists whole or not at all.
Large ones in page-aligned memory bypass the page cache: 2.2 GB/s on the disk where buffered writes with their
flush made 1.4, and the cache stays available for training.
"""

import contextlib
import errno
import os
import re
import uuid
from collections.abc import Iterable, Sequence
from pathlib import Path

from ..core.errors import StoreError
from ..job.heartbeat import heartbeat
from ..system import files
from ..system.replacement import flush_folder
from .direct import MIN_DIRECT_BYTES, PAGE, buffer_address, read_direct
from .store import Buffer, Entry, ObjectNotFoundError, check_path

TEMPORARY = ".tmp"
_PARTIAL = re.compile(r"\.[0-9a-f]{32}" + re.escape(TEMPORARY))
_WRITE_BYTES = 2**24
_READ_BYTES = 2**30
"""Maximum size of one read: macOS refuses reads of 2 GiB."""


class LocalStore:
    """A store of files below `url`, a folder that is created when the first file is written."""

    writers = 2
    readers = 2

    def __init__(self, url: str | Path) -> None:
        self.url = str(url)
        # Relative to the current folder now: it may change while the store is in use.
        self._root = files.absolute_path(url)

    def write(self, path: str, parts: Sequence[Buffer]) -> None:
        target = self._writable_path(path)
        partial = target.with_name(f".{uuid.uuid4().hex}{TEMPORARY}")
        try:
            for again in (True, True, False):
                try:
                    _make_folder(target.parent)
                    _write_file(partial, parts)
                    partial.rename(target)
                    break
                except FileNotFoundError:
                    # The folder went with its last object, which another writer removed just now.
                    if not again:
                        raise
                except BaseException:
                    with contextlib.suppress(OSError):
                        partial.unlink()
                    raise
            flush_folder(target.parent)
        except OSError as error:
            raise StoreError(
                f"{target} can't be written: {_reason(error)}; free space there, or check its permissions"
            ) from error

    def create(self, path: str, data: bytes) -> bool:
        target = self._writable_path(path)
        partial = target.with_name(f".{uuid.uuid4().hex}{TEMPORARY}")
        try:
            _make_folder(target.parent)
            _write_file(partial, [data])
            try:
                # A hard link fails if the name exists: a rename would replace it.
                os.link(partial, target)
            except FileExistsError:
                return False
            finally:
                partial.unlink()
            flush_folder(target.parent)
        except OSError as error:
            raise StoreError(
                f"{target} can't be written: {_reason(error)}; the file system must have hard links, and room"
            ) from error
        return True

    def read(self, path: str, start: int = 0, stop: int | None = None) -> bytes:
        file = self._path(path)
        if stop is None:
            try:
                stop = max(file.stat().st_size, start)
            except OSError as error:
                raise _unreadable(file, error) from error
        _check_range(path, start, stop)
        buffer = bytearray(stop - start)
        self.read_into(path, start, memoryview(buffer))
        return bytes(buffer)

    def read_into(self, path: str, start: int, target: memoryview) -> None:
        file, stop = self._path(path), start + len(target)
        _check_range(path, start, stop)
        try:
            if read_direct(file, start, target):
                return
            descriptor = os.open(file, os.O_RDONLY | os.O_CLOEXEC)
            try:
                done = 0
                while done < len(target):
                    count = os.preadv(descriptor, [target[done : done + _READ_BYTES]], start + done)
                    if count == 0:
                        raise StoreError(
                            f"{file} ends at byte {start + done}; expected {start} to {stop}: it is cut short"
                        )
                    done += count
            finally:
                os.close(descriptor)
        except StoreError:
            raise
        except OSError as error:
            raise _unreadable(file, error) from error

    def list(self, prefix: str = "") -> Sequence[Entry]:
        root, entries = self._within(prefix), []
        try:
            for folder, _, names in os.walk(root, onerror=_raise):
                for name in names:
                    if not _is_partial(name):
                        file = Path(folder, name)
                        with contextlib.suppress(FileNotFoundError):
                            entries.append(Entry(file.relative_to(self._root).as_posix(), file.stat().st_size))
        except (FileNotFoundError, NotADirectoryError):
            return []
        except OSError as error:
            raise _unreadable(root, error) from error
        return sorted(entries)

    def folders(self, prefix: str = "") -> Sequence[str]:
        root = self._within(prefix)
        try:
            return sorted(entry.name for entry in os.scandir(root) if entry.is_dir())
        except (FileNotFoundError, NotADirectoryError):
            return []
        except OSError as error:
            raise _unreadable(root, error) from error

    def delete(self, paths: Iterable[str]) -> None:
        folders = set()
        for path in paths:
            file = self._path(path)
            try:
                if (link := files.find_link(self._root, file)) is not None:
                    file = link  # the link is removed, and its target stays
                if files.remove(self._root, file):
                    folders.add(file.parent)
            except OSError as error:
                raise _unremovable(file, error) from error
        for folder in folders:
            with contextlib.suppress(FileNotFoundError):
                flush_folder(folder)
        # A folder exists only for its objects: an empty one is removed with its last object.
        for folder in sorted(folders, key=lambda f: len(f.parts), reverse=True):
            while folder != self._root and folder.is_relative_to(self._root):
                try:
                    folder.rmdir()
                except OSError:
                    break
                folder = folder.parent

    def sweep(self, folders: Iterable[str] = ("",)) -> None:
        """Remove leftovers of killed writers from these folders: temporary names, and folders without a file.

        No process may be writing to the store. Links are skipped.
        """
        try:
            for each in folders:
                if self.is_link(each):
                    continue
                for folder, names in files.walk(self._within(each)):
                    for name in filter(_is_partial, names):
                        files.remove(self._root, folder / name)
                    if folder != self._root:
                        with contextlib.suppress(OSError):
                            folder.rmdir()
        except OSError as error:
            raise _unremovable(self._root, error) from error

    def is_link(self, path: str) -> bool:
        return bool(path) and files.find_link(self._root, self._path(path)) is not None

    def _writable_path(self, path: str) -> Path:
        """Return the path at which an object is to be written.

        Raises:
            StoreError: The path leads through a link, and so out of the store.
        """
        target = self._path(path)
        link = files.find_link(self._root, target.parent)
        if link is not None:
            raise StoreError(
                f"{target} is not written: {link} is a link to {os.readlink(link)}, which is left as it is; remove the link, "
                f"or choose another folder"
            )
        return target

    def _path(self, path: str) -> Path:
        return self._root / check_path(path)

    def _within(self, prefix: str) -> Path:
        return self._path(prefix) if prefix else self._root


def _write_file(path: Path, parts: Sequence[Buffer]) -> None:
    size = sum(len(part) for part in parts)
    if size >= MIN_DIRECT_BYTES and _pages(parts) and _write_direct(path, parts):
        return
    with open(path, "wb", buffering=0) as file:
        _write_parts(file.fileno(), parts)


def _write_direct(path: Path, parts: Sequence[Buffer]) -> bool:
    """Write past the page cache; False if the file system does not support it (tmpfs, some network ones)."""
    if not hasattr(os, "O_DIRECT"):
        return False
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_DIRECT | os.O_CLOEXEC, 0o666)
    except OSError:
        return False
    try:
        _write_parts(descriptor, parts)
    except OSError as error:
        # If pages are larger than here, the file is written again, through the cache.
        if error.errno != errno.EINVAL:
            raise
        return False
    finally:
        os.close(descriptor)
    return True


def _write_parts(descriptor: int, parts: Sequence[Buffer]) -> None:
    for part in parts:
        _write_all(descriptor, part)
    os.fsync(descriptor)
    written, expected = os.fstat(descriptor).st_size, sum(len(part) for part in parts)
    if written != expected:
        raise OSError(errno.EIO, f"the file has {written} bytes where {expected} were written")


def _write_all(descriptor: int, part: Buffer) -> None:
    view = memoryview(part)
    while len(view):
        view = view[os.write(descriptor, view[:_WRITE_BYTES]) :]
        # A slow write of a large file is not a hang.
        heartbeat().report_progress("save")


def _pages(parts: Sequence[Buffer]) -> bool:
    """Return True if every part is whole pages of memory, as required for writes past the page cache."""
    return all(len(part) % PAGE == 0 and buffer_address(part) % PAGE == 0 for part in parts)


def _make_folder(folder: Path) -> None:
    if not folder.is_dir():
        _make_folder(folder.parent)
        folder.mkdir(exist_ok=True)
        flush_folder(folder.parent)


def _raise(error: OSError) -> None:
    raise error


def _reason(error: OSError) -> str:
    return error.strerror or str(error)


def _unreadable(file: Path, error: OSError) -> StoreError:
    if isinstance(error, FileNotFoundError | NotADirectoryError | IsADirectoryError):
        return ObjectNotFoundError(f"{file} does not exist")
    return StoreError(f"{file} can't be read: {_reason(error)}; check its permissions")


def _unremovable(file: Path, error: OSError) -> StoreError:
    return StoreError(f"{file} can't be removed: {_reason(error)}; check its permissions")


def _is_partial(name: str) -> bool:
    return _PARTIAL.fullmatch(name) is not None


def _check_range(path: str, start: int, stop: int) -> None:
    if not 0 <= start <= stop:
        raise StoreError(f"bytes {start} to {stop} of {path} can't be read; expected 0 <= start <= stop")
