"""Deleting, listing and writing files where somebody may have put a link: a link is a thing of its own, not what it leads to.

People link a checkpoint of another run into a new one, or leave links where they have moved folders. What lies behind a link is
not this program's: a link is removed as a link, walks pass it over, and nothing is written through it.
"""

import contextlib
import os
import stat
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import IO

_BLOCK = 1 << 16


def absolute_path(path: str | os.PathLike[str]) -> Path:
    """A path that stays the same when the current folder changes; links in it are kept.

    >>> absolute_path("runs/../a").name
    'a'
    """
    return Path(os.path.abspath(expand_user(path)))


def expand_user(path: str | os.PathLike[str]) -> Path:
    """A path with a user's home folder for the `~` or `~user` that it begins with; as a shell has it, `~nobody` stays a name.

    >>> expand_user("~such-a-user-is-not-here/a").parts[0]
    '~such-a-user-is-not-here'
    """
    return Path(os.path.expanduser(path))


def find_link(root: Path, path: Path) -> Path | None:
    """The first link on the way from a folder to a path in it; None where there is none. The folder itself may be one."""
    at = root
    for part in path.relative_to(root).parts:
        at = at / part
        if at.is_symlink():
            return at
    return None


def remove(root: Path, path: Path) -> bool:
    """Remove a file; on the way to it, a link is removed instead, and what it leads to stays. Whether something was there.

    Args:
        root: What may be a link, and is followed.

    Raises:
        OSError: It can't be removed, or is a folder.
    """
    try:
        (find_link(root, path) or path).unlink()
    except (FileNotFoundError, NotADirectoryError):
        return False
    return True


def walk(folder: Path, *, onerror: Callable[[OSError], None] | None = None) -> Iterator[tuple[Path, list[str]]]:
    """The folders below one, deepest first, with the names of their files; links are neither followed nor named."""
    for at, _, names in os.walk(folder, topdown=False, onerror=onerror, followlinks=False):
        yield Path(at), [name for name in names if not os.path.islink(os.path.join(at, name))]


def remove_folder(folder: Path) -> None:
    """Remove a folder with all that is in it; a link is removed as one. What is gone already is no error.

    Raises:
        OSError: Something can't be removed; what could be, was.
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
    """Remove a folder as far as the system lets it: what can't be removed is swept by whoever comes next."""
    with contextlib.suppress(OSError):
        remove_folder(folder)


def is_regular_file(path: Path) -> bool:
    """Whether there is a file of its own at a path: not a link, pipe, device or folder."""
    try:
        return stat.S_ISREG(path.lstat().st_mode)
    except OSError:
        return False


def replace_link(path: Path) -> str:
    """Where a file is to be written and a link stands: remove the link, so that its target is not written.

    Returns:
        What it led to; empty where there was none.

    Raises:
        OSError: The link can't be removed.
    """
    if not path.is_symlink():
        return ""
    target = os.readlink(path)
    path.unlink(missing_ok=True)
    return target


def trim_partial_line(file: IO[bytes]) -> None:
    """Cut what a power failure has left of a last line, so that the next one is whole; a file that does not end in a newline.

    Args:
        file: Open for reading and writing; where it stands afterwards is its end.
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
    """Add lines to a file, made where it is missing; half a line at its end is cut first.

    Raises:
        OSError: It can't be written, or is a link.
    """
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)
    with os.fdopen(descriptor, "r+b", buffering=0) as file:
        trim_partial_line(file)
        file.write("".join(f"{line}\n" for line in lines).encode())


def apply_umask(path: Path) -> None:
    """Give a file that a library has made the mode that `open` would have: by the umask, and not for its owner alone.

    Raises:
        OSError: It can't be changed.
    """
    mask = os.umask(0)
    os.umask(mask)
    path.chmod(0o666 & ~mask)
