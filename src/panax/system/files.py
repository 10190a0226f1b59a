"""Deleting, listing and writing files in folders that may contain symbolic links; a link is an object in its
own right, distinct from its target.

People link a checkpoint of another run into a new one, or leave links where they have moved folders. The
target of a link does not belong to this program: a link is removed as a link, walks skip it, and nothing is
written through it.
"""

import contextlib
import os
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import IO

_BLOCK = 1 << 16


def absolute_path(path: str | os.PathLike[str]) -> Path:
    """Return a path that stays the same when the current folder changes; links in it are not resolved.

    >>> absolute_path("runs/../a").name
    'a'
    """
    return Path(os.path.abspath(expand_user(path)))


def expand_user(path: str | os.PathLike[str]) -> Path:
    """Expand a leading `~` or `~user` to the home folder; as in a shell, `~nobody` remains if there is no
    such user.

    >>> expand_user("~such-a-user-is-not-here/a").parts[0]
    '~such-a-user-is-not-here'
    """
    return Path(os.path.expanduser(path))


def find_link(root: Path, path: Path) -> Path | None:
    """Return the first link on the way from a folder to a path in it, or None. The folder itself may be a
    link."""
    at = root
    for part in path.relative_to(root).parts:
        at = at / part
        if at.is_symlink():
            return at
    return None


def remove(root: Path, path: Path) -> bool:
    """Remove a file; if a link is on the way to it, that link is removed instead, and its target stays.

    Args:
        root: Folder that may itself be a link, and is followed.

    Returns:
        True if something was removed.

    Raises:
        OSError: The file can't be removed, or is a folder.
    """
    try:
        (find_link(root, path) or path).unlink()
    except (FileNotFoundError, NotADirectoryError):
        return False
    return True


def walk(folder: Path, *, onerror: Callable[[OSError], None] | None = None) -> Iterator[tuple[Path, list[str]]]:
    """Yield the folders below a folder, deepest first, with the names of their files; links are neither
    followed nor listed."""
    for at, _, names in os.walk(folder, topdown=False, onerror=onerror, followlinks=False):
        yield Path(at), [name for name in names if not os.path.islink(os.path.join(at, name))]


def remove_folder(folder: Path) -> None:
    """Remove a folder with all of its contents; a link is removed as a link. Missing files are not an error.

    Raises:
        OSError: Something can't be removed; everything else was.
    """
    if folder.is_symlink():
        with contextlib.suppress(FileNotFoundError):
            folder.unlink()
        return
    first: list[OSError] = []

    def keep(error: OSError) -> None:
        if not isinstance(error, FileNotFoundError):
            first.append(error)

    for at, _, _ in os.walk(folder, topdown=False, onerror=keep, followlinks=False):
        try:
            entries = list(os.scandir(at))
        except OSError as error:
            keep(error)
            continue
        for entry in entries:
            try:
                if not entry.is_dir(follow_symlinks=False):
                    os.unlink(entry.path)
            except OSError as error:
                keep(error)
        try:
            os.rmdir(at)
        except OSError as error:
            keep(error)
    if first:
        raise first[0]


def discard_folder(folder: Path) -> None:
    """Remove a folder as far as the system permits: the rest is left for a later cleanup."""
    with contextlib.suppress(OSError):
        remove_folder(folder)


def trim_partial_line(file: IO[bytes]) -> None:
    """Truncate an incomplete last line, as a power failure leaves it, so that the next one is whole.

    Args:
        file: Open for reading and writing; afterwards its position is its end.
    """
    size = file.seek(0, os.SEEK_END)
    end = size
    while end:
        begin = max(end - _BLOCK, 0)
        file.seek(begin)
        place = file.read(end - begin).rfind(b"\n")
        if place >= 0:
            end = begin + place + 1
            break
        end = begin
    if end != size:
        file.truncate(end)
    file.seek(0, os.SEEK_END)


def append_lines(path: Path, lines: Iterable[str]) -> None:
    """Append lines to a file, which is created if missing; an incomplete line at its end is removed first.

    Raises:
        OSError: The file can't be written, or is a link.
    """
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)
    with os.fdopen(descriptor, "r+b", buffering=0) as file:
        trim_partial_line(file)
        file.write("".join(f"{line}\n" for line in lines).encode())


def apply_umask(path: Path) -> None:
    """Set the mode of a file that a library created to that of a file created by `open`, by the umask, instead
    of owner-only.

    Raises:
        OSError: The mode can't be changed.
    """
    mask = os.umask(0)
    os.umask(mask)
    path.chmod(0o666 & ~mask)
