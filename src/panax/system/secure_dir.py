"""Folders that only this user can have written to, for files that are trusted, or removed, because of their
location."""

import functools
import os
import stat
from pathlib import Path


def make_private_folder(path: str | Path) -> Path:
    """Create a folder that only this user can write to, or check that an existing folder is private in this
    way.

    Missing parents are created too; all parents must belong to this user or root; a parent that all may write
    to must be sticky, as `/tmp` and `/dev/shm` are, so that no other user can replace this folder.

    Returns:
        The folder, without links in its path.

    Raises:
        PermissionError: The folder is a link, it or a parent belongs to another user, or others may write to
            it.
        OSError: The folder can't be created.
    """
    path = Path(path)
    if path.is_symlink():
        raise PermissionError(f"{path} is a link to {os.readlink(path)}; expected a folder of this user's own")
    path.mkdir(parents=True, exist_ok=True, mode=0o700)
    folder = path.resolve()
    _check(folder, owners=(os.geteuid(),), sticky=False)
    for parent in folder.parents:
        _check(parent, owners=(os.geteuid(), 0), sticky=True)
    return folder


def is_own_file(path: str | Path) -> bool:
    """Return True if a path is a regular file of this user, not a link, which no other user may write to."""
    try:
        found = os.lstat(path)
    except OSError:
        return False
    return stat.S_ISREG(found.st_mode) and found.st_uid == os.geteuid() and not _others_write(found)


def is_own_folder(path: str | Path) -> bool:
    """Return True if a path is a folder of this user, not a link, which no other user may write to."""
    try:
        found = os.lstat(path)
    except OSError:
        return False
    return stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid() and not _others_write(found)


def _check(folder: Path, owners: tuple[int, ...], *, sticky: bool) -> None:
    found = os.lstat(folder)
    if not stat.S_ISDIR(found.st_mode):
        raise PermissionError(f"{folder} is not a folder; expected a folder of this user's own")
    if found.st_uid not in owners:
        raise PermissionError(f"{folder} belongs to user {found.st_uid}, not to this user ({os.geteuid()})")
    if _others_write(found) and not (sticky and found.st_mode & stat.S_ISVTX):
        raise PermissionError(f"others may write to {folder}; run `chmod go-w {folder}`, or choose another folder")


def _others_write(found: os.stat_result) -> bool:
    by_group = found.st_mode & stat.S_IWGRP and found.st_gid != _private_group()
    return bool(by_group or found.st_mode & stat.S_IWOTH)


@functools.cache
def _private_group() -> int | None:
    """Return the group with this user as its only member, as many systems make one for each user; None if
    there is no such group."""
    import grp
    import pwd

    try:
        user = pwd.getpwuid(os.geteuid())
        group = grp.getgrgid(user.pw_gid)
    except KeyError:
        return None
    return user.pw_gid if group.gr_name == user.pw_name and set(group.gr_mem) <= {user.pw_name} else None
