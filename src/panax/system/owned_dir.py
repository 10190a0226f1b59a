"""Folders that Panax removes, or removes files from: only those that it made, which contain its marker
file."""

import os
from pathlib import Path

from .files import discard_folder

OWNER_MARKER = ".made-by-panax"
"""Name of the marker, an empty file."""


def make_owned_dir(folder: Path) -> Path:
    """Create a folder with Panax's marker in it, or check that an existing folder has the marker.

    Raises:
        FileExistsError: The folder is not empty and has no marker, so it is not Panax's.
        OSError: The folder can't be created.
    """
    folder.mkdir(parents=True, exist_ok=True)
    mark = folder / OWNER_MARKER
    if not mark.is_file():
        # Checked again: another process may have made it meanwhile, and writes the marker first.
        if any(folder.iterdir()) and not mark.is_file():
            raise FileExistsError(f"{folder} contains files and was not created by Panax, so nothing in it is removed")
        os.close(os.open(mark, os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666))
    return folder


def remove_owned_dir(folder: Path) -> None:
    """Remove a folder with all of its contents, if it has Panax's marker and is not a link; otherwise leave
    it."""
    if (folder / OWNER_MARKER).is_file() and not folder.is_symlink():
        discard_folder(folder)
